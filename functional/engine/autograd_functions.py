"""The autograd Functions through which a LoweredFunction is differentiated and vmapped.

Three Functions, for different functorch levels around the call. *Plain* (no level) and *Level* (exactly
one Grad level) run the halves of the joint program; their backward is a Function itself, so that a
second derivative works. *AnyLevels* (any other stack) saves the primals alone, and each
of its derivatives is a call of a derived LoweredFunction: any order, any nesting.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.engine.lowered_function import Halves, LoweredFunction, width
from torchard.functional.programs.program import Leaf
from torchard.functional.programs.tags import VAL
from torchard.functional.tracing.trace_state import current_frames, in_frames

__all__ = ["call"]

Tensors = Sequence[torch.Tensor]
_requires_grad = attrgetter("requires_grad")
Outputs = tuple[list[torch.Tensor], tuple[Leaf, ...]]


def call(lowered: LoweredFunction, parts: Tensors, resolved: bool = False) -> Outputs:
    """Run a lowered function on its input parts, under any transform; return output parts and leaves.

    Args:
        resolved: whether it is known that no part is conjugated or negated lazily.
    """
    if not resolved:
        parts = internals.resolved(parts, lowered.complex)
    if internals.autocast_on():
        with internals.autocast_off():
            return _call(lowered, parts)
    return _call(lowered, parts)


def _call(lowered: LoweredFunction, parts: Tensors) -> Outputs:
    if not (internals.has_transforms() or internals.forward_ad_active()):
        if torch.is_grad_enabled() and any(map(_requires_grad, parts)):
            return _call_plain(lowered, parts)
        return lowered.run(parts), lowered.program.outputs
    return _call_level(lowered, parts) if _fast() else _call_any_levels(lowered, parts)


def _call_plain(lowered: LoweredFunction, parts: Tensors) -> Outputs:
    mask = lowered.per_input([_follows(part) for part in parts])
    if not any(mask):
        return lowered.run(parts), lowered.program.outputs
    halves = lowered.halves(mask)
    return list(_apply(_Plain, lowered, mask, halves, *parts)), halves.outputs


def _follows(part: torch.Tensor) -> bool:
    return part.requires_grad and is_inexact(part)


def _call_level(lowered: LoweredFunction, parts: Tensors) -> Outputs:
    mask = lowered.per_input([internals.needs_grad_at_top(part) for part in parts])
    if not any(mask):
        return _call_any_levels(lowered, parts)
    halves = lowered.halves(mask)
    results = _apply(_Level, lowered, mask, halves, *parts)
    return list(results[: halves.count]), halves.outputs


def _call_any_levels(lowered: LoweredFunction, parts: Tensors) -> Outputs:
    return list(_apply(_AnyLevels, lowered, *parts)), lowered.program.outputs


def _fast() -> bool:
    """Whether the halves may be used: no functorch level, or a single Grad level, and no tangents."""
    if internals.forward_ad_active():
        return False
    return not internals.has_transforms() or internals.level_kinds() == [internals.GRAD]


def _distinct(outputs: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    """The outputs, each a tensor object of its own: autograd keeps its metadata per object."""
    seen = {id(tensor) for tensor in inputs}
    distinct = []
    for output in outputs:
        distinct.append(output.view_as(output) if id(output) in seen else output)
        seen.add(id(output))
    return distinct


def _apart(output: torch.Tensor) -> torch.Tensor:
    """The output in memory of its own, without overlapping entries.

    torch lays out a tangent as its primal is; where the primal is a view, it asserts that the two have
    the same layout already.
    """
    repeats = any(n > 1 and not s for n, s in zip(output.shape, output.stride(), strict=True))
    if repeats or internals.is_view(output):
        return output.clone(memory_format=torch.contiguous_format)
    return output


def _cotangents(ctx: Any, wanted: Sequence[int], grads: Sequence[Any]) -> list[torch.Tensor]:
    """The cotangents of the wanted output parts; zeros where autograd has None."""
    cotangents = []
    for i in wanted:
        shape, dtype, device = ctx.shapes[i]
        grad = grads[i]
        if grad is None:
            grad = torch.zeros(shape, dtype=dtype, device=device)
        cotangents.append(grad.contiguous())
    return internals.resolved(cotangents)


def _shapes(outputs: Tensors) -> list[Any]:
    return [(output.shape, output.dtype, output.device) for output in outputs]


def _pick(halves: Halves, inputs: Tensors, outputs: Tensors, values: Tensors) -> list[torch.Tensor]:
    lists = ((*inputs, *halves.constants), outputs, values)
    return [lists[which][i] for which, i in halves.saved]


def _spread(values: Sequence[Any], positions: Sequence[int | None]) -> list[Any]:
    return [None if i is None else values[i] for i in positions]


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Plain(torch.autograd.Function):
    """No functorch level: the fewest steps between autograd and the halves."""

    @staticmethod
    def forward(
        ctx: Any, lowered: LoweredFunction, mask: tuple[bool, ...], halves: Halves, *parts: torch.Tensor
    ) -> Any:
        results = halves.forward(list(parts))
        outputs = _distinct(results[: halves.count], parts)
        residuals = _pick(halves, parts, outputs, results[halves.count :])
        ctx.lowered, ctx.mask, ctx.halves, ctx.count = lowered, mask, halves, len(parts)
        ctx.shapes, ctx.frames = _shapes(outputs), current_frames()
        ctx.save_for_backward(*residuals)
        # Not saved by autograd: a first derivative does not read them, so they may be changed in place.
        ctx.primals = _Primals(parts)
        ctx.set_materialize_grads(False)
        off = [o for o, d in zip(outputs, halves.differentiable, strict=True) if not d]
        ctx.mark_non_differentiable(*off)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        residuals = list(ctx.saved_tensors)
        again = torch.is_grad_enabled() or internals.has_transforms()
        saved = [*(ctx.primals.unchanged() if again else ctx.primals.parts), *residuals]
        del residuals
        # Unless the graph is retained, each residual is freed after its last use in the backward.
        ctx.maybe_clear_saved_tensors()
        freed = internals.saved_were_freed(ctx)
        if freed:
            ctx.primals = None
        with in_frames(ctx.frames):
            return (None, None, None, *_backward(ctx, saved, grads, freed))


class _Primals:
    """The inputs and their version counters, for a second derivative."""

    def __init__(self, parts: Tensors) -> None:
        self.parts = parts
        self.versions = [_version(part) for part in parts]

    def unchanged(self) -> Tensors:
        """The parts.

        Raises:
            RuntimeError: one was changed in place since.
        """
        for part, version in zip(self.parts, self.versions, strict=True):
            if _version(part) != version:
                raise RuntimeError(
                    f"an input of shape {list(part.shape)} was changed in place after the forward, and "
                    "the second derivative needs the value it had: change a clone() instead."
                )
        return self.parts


def _version(part: torch.Tensor) -> int:
    return 0 if part.is_inference() else internals.version(part)


def _backward(
    ctx: Any, saved: list[torch.Tensor], grads: Sequence[Any], freed: bool = False
) -> list[Any]:
    """The gradients of the input parts.

    Args:
        freed: whether only this list has the residuals, so that the backward may overwrite them.
    """
    if internals.autocast_on():  # the program has its own casts, wherever the backward runs
        with internals.autocast_off():
            return _backward(ctx, saved, grads, freed)
    halves: Halves = ctx.halves
    cotangents = _cotangents(ctx, halves.cotangents, grads)
    if not any(position is not None for position in halves.gradients):
        return [None] * ctx.count
    if not torch.is_grad_enabled() and not internals.has_transforms():
        del saved[: ctx.count]
        saved += cotangents
        del cotangents
        return _spread(halves.backward(saved if freed else tuple(saved)), halves.gradients)
    primals, residuals = saved[: ctx.count], saved[ctx.count :]
    if not _fast():  # jacrev: vmap over the backward
        tags = tuple(leaf.tag for leaf in halves.outputs)
        return _pulled(ctx.lowered, ctx.mask, tags, primals, cotangents)
    gradients = _apply(_Backward, ctx.lowered, halves, len(cotangents), *primals, *cotangents, *residuals)
    return _spread(gradients, halves.gradients)


class _Level(torch.autograd.Function):
    """Exactly one Grad level: residuals are outputs too, since setup_context sees only those."""

    @staticmethod
    def forward(
        lowered: LoweredFunction, mask: tuple[bool, ...], halves: Halves, *parts: torch.Tensor
    ) -> Any:
        results = halves.forward(list(parts))
        return tuple(_distinct(results, parts))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        lowered, mask, halves, *parts = inputs
        outputs, values = output[: halves.count], output[halves.count :]
        residuals = _pick(halves, parts, outputs, values)
        ctx.lowered, ctx.mask, ctx.halves, ctx.count = lowered, mask, halves, len(parts)
        ctx.shapes, ctx.frames = _shapes(outputs), current_frames()
        ctx.save_for_backward(*parts, *residuals)
        ctx.set_materialize_grads(False)
        off = [o for o, d in zip(outputs, halves.differentiable, strict=True) if not d]
        ctx.mark_non_differentiable(*off, *values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        halves: Halves = ctx.halves
        needs = ctx.lowered.per_input(ctx.needs_input_grad[3:])
        with in_frames(ctx.frames):
            if all(m or not n for m, n in zip(ctx.mask, needs, strict=True)):
                gradients = _backward(ctx, list(ctx.saved_tensors), grads[: halves.count])
            else:
                tags = tuple(leaf.tag for leaf in halves.outputs)
                primals = ctx.saved_tensors[: ctx.count]
                cotangents = _cotangents(ctx, halves.cotangents, grads)
                gradients = _pulled(ctx.lowered, needs, tags, primals, cotangents)
        return (None, None, None, *gradients)


def _pulled(
    lowered: LoweredFunction,
    mask: tuple[bool, ...],
    tags: tuple[Any, ...],
    primals: Tensors,
    cotangents: Tensors,
) -> list[Any]:
    """Gradients computed by a call of the pullback: one entry per input part."""
    mask = tuple(
        m and is_inexact(VAL.of(node)) for m, node in zip(mask, lowered.base.placeholders, strict=False)
    )
    pull = lowered.pullback(mask, tags)
    if not pull.base.outputs:
        return [None] * len(primals)
    parts, _ = call(pull, [*primals, *cotangents])
    gradients: list[Any] = [None] * len(primals)
    starts = [sum(lowered.widths[:i]) for i in range(len(lowered.widths))]
    position = 0
    for leaf in pull.base.outputs:
        assert leaf.of is not None
        for k in range(lowered.widths[leaf.of]):
            gradients[starts[leaf.of] + k] = parts[position]
            position += 1
    return gradients


class _Backward(torch.autograd.Function):
    """The backward half, as a function of primals and cotangents; residuals are constants of it."""

    @staticmethod
    def forward(lowered: LoweredFunction, halves: Halves, cotangents: int, *tensors: torch.Tensor) -> Any:
        count = sum(lowered.widths)
        given, residuals = tensors[count : count + cotangents], tensors[count + cotangents :]
        gradients = halves.backward([*residuals, *given])
        return tuple(_distinct(gradients, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        lowered, halves, cotangents, *tensors = inputs
        count = sum(lowered.widths)
        ctx.lowered, ctx.halves = lowered, halves
        ctx.count, ctx.cotangents, ctx.total = count, cotangents, len(tensors)
        ctx.save_for_backward(*tensors[: count + cotangents])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tags = tuple(leaf.tag for leaf in ctx.halves.outputs)
        # The half has no gradient for inputs that the outputs do not depend on; nor may its derivative.
        given = ctx.lowered.per_input([position is not None for position in ctx.halves.gradients])
        pull = ctx.lowered.pullback(given, tags)
        needs = pull.per_input(ctx.needs_input_grad[3 : 3 + ctx.count + ctx.cotangents])
        cotangents = [grad.contiguous() for grad in grads]
        gradients = _pulled(pull, needs, pull.tags, ctx.saved_tensors, cotangents)
        rest = ctx.total - ctx.count - ctx.cotangents
        return (None, None, None, *gradients, *[None] * rest)


class _AnyLevels(torch.autograd.Function):
    """Any stack of levels: saves primals only; every derivative is a derived LoweredFunction."""

    @staticmethod
    def forward(lowered: LoweredFunction, *parts: torch.Tensor) -> Any:
        outputs = _distinct(lowered.run(parts), parts)
        return tuple(map(_apart, outputs) if internals.forward_ad_active() else outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        lowered, *parts = inputs
        ctx.lowered, ctx.shapes, ctx.frames = lowered, _shapes(output), current_frames()
        ctx.save_for_backward(*parts)
        ctx.save_for_forward(*parts)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(o for o in output if not is_inexact(o))
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        lowered: LoweredFunction = ctx.lowered
        cotangents = _cotangents(ctx, _float_parts(lowered), grads)
        mask = lowered.per_input(ctx.needs_input_grad[1:])
        with in_frames(ctx.frames):
            return (None, *_pulled(lowered, mask, lowered.tags, ctx.saved_tensors, cotangents))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        lowered: LoweredFunction = ctx.lowered
        results: list[Any] = [None] * len(ctx.shapes)
        floats = _float_parts(lowered)
        if not floats:
            return tuple(results)
        parts = ctx.saved_tensors
        moved = lowered.per_input([tangent is not None for tangent in tangents[1:]])
        given = [
            torch.zeros_like(part) if tangent is None else tangent.contiguous()
            for part, tangent, m in zip(parts, tangents[1:], lowered.per_part(moved), strict=True)
            if m
        ]
        output_tangents, _ = call(lowered.pushforward(moved, lowered.tags), [*parts, *given])
        for part, tangent in zip(floats, output_tangents, strict=True):
            results[part] = tangent
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, lowered: LoweredFunction, *parts: torch.Tensor) -> Any:
        dims = in_dims[1:]
        mapped = lowered.per_input([dim is not None for dim in dims])
        moved = [
            _in_front(part, dim, info.batch_size) if m else part
            for part, dim, m in zip(parts, dims, lowered.per_part(mapped), strict=True)
        ]
        outputs, _ = call(lowered.batched(mapped, info.batch_size, lowered.tags), moved)
        return tuple(outputs), (0,) * len(outputs)


def _in_front(part: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    if dim is None:
        return part.unsqueeze(0).expand(size, *part.shape).contiguous()
    return part.movedim(dim, 0).contiguous()


def _float_parts(lowered: LoweredFunction) -> list[int]:
    """Indices of the output parts that have a derivative."""
    indices: list[int] = []
    position = 0
    for leaf, node in zip(lowered.program.outputs, lowered.base.results, strict=True):
        w = 1 if lowered.inline else width(leaf)
        if is_inexact(VAL.of(node)):
            indices += range(position, position + w)
        position += w
    return indices
