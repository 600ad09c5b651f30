"""The autograd Functions through which a Flat is differentiated and vmapped.

Three, by what is live around the call. *Plain* (no functorch level) and *Level* (exactly one Grad
level) run the halves of the joint program; their backward is a Function itself, so that a second
derivative works. *Again* (any other stack) saves the primals alone, and each of its derivatives is
a call of a derived Flat: any order, any nesting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.engine.lowered_function import Flat, Halves, width
from torchard.functional.programs.program import Leaf
from torchard.functional.programs.tags import VAL
from torchard.functional.tracing.trace_state import current_frames, frames_again

__all__ = ["call"]

Tensors = Sequence[torch.Tensor]


def call(flat: Flat, parts: Tensors) -> tuple[list[torch.Tensor], tuple[Leaf, ...]]:
    """Run a Flat on its input parts under whatever is live; the output parts and their leaves."""
    parts = internals.resolved(parts, flat.complex)
    if internals.autocast_on():
        with internals.autocast_off():
            return _call(flat, parts)
    return _call(flat, parts)


def _call(flat: Flat, parts: Tensors) -> tuple[list[torch.Tensor], tuple[Leaf, ...]]:
    if not _fast():
        return _call_again(flat, parts)
    if internals.has_transforms():
        return _call_level(flat, parts)
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return _call_plain(flat, parts)
    return flat.run(parts), flat.program.outputs


def _call_plain(flat: Flat, parts: Tensors) -> tuple[list[torch.Tensor], tuple[Leaf, ...]]:
    mask = flat.per_input([_follows(part) for part in parts])
    if not any(mask):
        return flat.run(parts), flat.program.outputs
    halves = flat.halves(mask)
    return list(_apply(_Plain, flat, mask, halves, *parts)), halves.outputs


def _follows(part: torch.Tensor) -> bool:
    return part.requires_grad and (part.is_floating_point() or part.is_complex())


def _call_level(flat: Flat, parts: Tensors) -> tuple[list[torch.Tensor], tuple[Leaf, ...]]:
    mask = flat.per_input([internals.needs_grad_at_top(part) for part in parts])
    if not any(mask):
        return _call_again(flat, parts)
    halves = flat.halves(mask)
    results = _apply(_Level, flat, mask, halves, *parts)
    return list(results[: halves.count]), halves.outputs


def _call_again(flat: Flat, parts: Tensors) -> tuple[list[torch.Tensor], tuple[Leaf, ...]]:
    return list(_apply(_Again, flat, *parts)), flat.program.outputs


def _fast() -> bool:
    """Whether the halves may be used: no level but at most one Grad level, and no tangents."""
    if internals.forward_ad_active():
        return False
    return not internals.has_transforms() or internals.level_kinds() == [internals.GRAD]


def _distinct(outputs: Tensors, inputs: Tensors) -> list[torch.Tensor]:
    """autograd keeps books per tensor object: an output is neither an input nor another output."""
    seen = {id(tensor) for tensor in inputs}
    found = []
    for output in outputs:
        found.append(output.view_as(output) if id(output) in seen else output)
        seen.add(id(output))
    return found


def _apart(output: torch.Tensor) -> torch.Tensor:
    """In memory of its own, each entry: torch writes a tangent into memory laid out as its primal is,
    and where that is a view asserts that the two are alike already."""
    repeats = any(n > 1 and not s for n, s in zip(output.shape, output.stride(), strict=True))
    if repeats or internals.is_view(output):
        return output.clone(memory_format=torch.contiguous_format)
    return output


def _cotangents(ctx: Any, wanted: Sequence[int], grads: Sequence[Any]) -> list[torch.Tensor]:
    """Those of these output parts, with zeros where there is none."""
    found = []
    for i in wanted:
        shape, dtype, device = ctx.shapes[i]
        grad = grads[i]
        if grad is None:
            grad = torch.zeros(shape, dtype=dtype, device=device)
        found.append(grad.contiguous())
    return internals.resolved(found)


def _shapes(outputs: Tensors) -> list[Any]:
    return [(output.shape, output.dtype, output.device) for output in outputs]


def _pick(halves: Halves, inputs: Tensors, outputs: Tensors, values: Tensors) -> list[torch.Tensor]:
    lists = ((*inputs, *halves.constants), outputs, values)
    return [lists[which][i] for which, i in halves.saved]


def _spread(found: Sequence[Any], positions: Sequence[int | None]) -> list[Any]:
    return [None if i is None else found[i] for i in positions]


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _Plain(torch.autograd.Function):
    """No functorch level: the fewest steps between autograd and the halves."""

    @staticmethod
    def forward(
        ctx: Any, flat: Flat, mask: tuple[bool, ...], halves: Halves, *parts: torch.Tensor
    ) -> Any:
        results = halves.forward(list(parts))
        outputs = _distinct(results[: halves.count], parts)
        residuals = _pick(halves, parts, outputs, results[halves.count :])
        ctx.flat, ctx.mask, ctx.halves, ctx.count = flat, mask, halves, len(parts)
        ctx.shapes, ctx.frames = _shapes(outputs), current_frames()
        ctx.save_for_backward(*residuals)
        # Not saved, since one derivative needs none of them: until then they may be changed in place.
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
        # Unless the graph is retained, residuals die as the backward uses them, not when it ends.
        ctx.maybe_clear_saved_tensors()
        if internals.saved_were_freed(ctx):
            ctx.primals = None
        with frames_again(ctx.frames):
            return (None, None, None, *_backward(ctx, saved, grads))


class _Primals:
    """Inputs as they were, for a derivative of the derivative."""

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
                    f"an input of shape {list(part.shape)} was changed in place after the forward: its "
                    "gradient's own gradient needs the value it had; change a clone() of it."
                )
        return self.parts


def _version(part: torch.Tensor) -> int:
    return 0 if part.is_inference() else internals.version(part)


def _backward(ctx: Any, saved: list[torch.Tensor], grads: Sequence[Any]) -> list[Any]:
    halves: Halves = ctx.halves
    cotangents = _cotangents(ctx, halves.cotangents, grads)
    if not any(position is not None for position in halves.gradients):
        return [None] * ctx.count
    if not torch.is_grad_enabled() and not internals.has_transforms():
        del saved[: ctx.count]
        saved += cotangents
        del cotangents
        return _spread(halves.backward(saved), halves.gradients)
    primals, residuals = saved[: ctx.count], saved[ctx.count :]
    if not _fast():  # jacrev: vmap over the backward
        tags = tuple(leaf.tag for leaf in halves.outputs)
        return _pulled(ctx.flat, ctx.mask, tags, primals, cotangents)
    found = _apply(_Backward, ctx.flat, halves, len(cotangents), *primals, *cotangents, *residuals)
    return _spread(found, halves.gradients)


class _Level(torch.autograd.Function):
    """Exactly one Grad level: residuals travel as outputs, which is all setup_context sees."""

    @staticmethod
    def forward(flat: Flat, mask: tuple[bool, ...], halves: Halves, *parts: torch.Tensor) -> Any:
        results = halves.forward(list(parts))
        return tuple(_distinct(results, parts))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        flat, mask, halves, *parts = inputs
        outputs, values = output[: halves.count], output[halves.count :]
        residuals = _pick(halves, parts, outputs, values)
        ctx.flat, ctx.mask, ctx.halves, ctx.count = flat, mask, halves, len(parts)
        ctx.shapes, ctx.frames = _shapes(outputs), current_frames()
        ctx.save_for_backward(*parts, *residuals)
        ctx.set_materialize_grads(False)
        off = [o for o, d in zip(outputs, halves.differentiable, strict=True) if not d]
        ctx.mark_non_differentiable(*off, *values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        halves: Halves = ctx.halves
        needs = ctx.flat.per_input(ctx.needs_input_grad[3:])
        with frames_again(ctx.frames):
            if all(m or not n for m, n in zip(ctx.mask, needs, strict=True)):
                found = _backward(ctx, list(ctx.saved_tensors), grads[: halves.count])
            else:
                tags = tuple(leaf.tag for leaf in halves.outputs)
                primals = ctx.saved_tensors[: ctx.count]
                cotangents = _cotangents(ctx, halves.cotangents, grads)
                found = _pulled(ctx.flat, needs, tags, primals, cotangents)
        return (None, None, None, *found)


def _pulled(
    flat: Flat, mask: tuple[bool, ...], tags: tuple[Any, ...], primals: Tensors, cotangents: Tensors
) -> list[Any]:
    """The gradients by a call of the pullback: one entry per input part."""
    mask = tuple(
        m and _is_float(node) for m, node in zip(mask, flat.base.placeholders, strict=False)
    )
    pull = flat.pullback(mask, tags)
    if not pull.base.outputs:
        return [None] * len(primals)
    parts, _ = call(pull, [*primals, *cotangents])
    found: list[Any] = [None] * len(primals)
    starts = [sum(flat.widths[:i]) for i in range(len(flat.widths))]
    position = 0
    for leaf in pull.base.outputs:
        assert leaf.of is not None
        for k in range(flat.widths[leaf.of]):
            found[starts[leaf.of] + k] = parts[position]
            position += 1
    return found


def _is_float(node: Any) -> bool:
    value = VAL.of(node)
    return bool(value.is_floating_point() or value.is_complex())


class _Backward(torch.autograd.Function):
    """The backward half, as a function of primals and cotangents (residuals are what it knows)."""

    @staticmethod
    def forward(flat: Flat, halves: Halves, cotangents: int, *tensors: torch.Tensor) -> Any:
        count = sum(flat.widths)
        given, residuals = tensors[count : count + cotangents], tensors[count + cotangents :]
        found = halves.backward([*residuals, *given])
        return tuple(_distinct(found, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        flat, halves, cotangents, *tensors = inputs
        count = sum(flat.widths)
        ctx.flat, ctx.halves = flat, halves
        ctx.count, ctx.cotangents, ctx.total = count, cotangents, len(tensors)
        ctx.save_for_backward(*tensors[: count + cotangents])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tags = tuple(leaf.tag for leaf in ctx.halves.outputs)
        # The half gives no gradient for what the outputs do not depend on; nor may this.
        given = ctx.flat.per_input([position is not None for position in ctx.halves.gradients])
        pull = ctx.flat.pullback(given, tags)
        needs = pull.per_input(ctx.needs_input_grad[3 : 3 + ctx.count + ctx.cotangents])
        cotangents = [grad.contiguous() for grad in grads]
        found = _pulled(pull, needs, pull.tags, ctx.saved_tensors, cotangents)
        rest = ctx.total - ctx.count - ctx.cotangents
        return (None, None, None, *found, *[None] * rest)


class _Again(torch.autograd.Function):
    """Any stack of levels: only primals are saved, every derivative is a derived Flat."""

    @staticmethod
    def forward(flat: Flat, *parts: torch.Tensor) -> Any:
        outputs = _distinct(flat.run(parts), parts)
        return tuple(map(_apart, outputs) if internals.forward_ad_active() else outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        flat, *parts = inputs
        ctx.flat, ctx.shapes, ctx.frames = flat, _shapes(output), current_frames()
        ctx.save_for_backward(*parts)
        ctx.save_for_forward(*parts)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(o for o in output if not (o.is_floating_point() or o.is_complex()))
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        flat: Flat = ctx.flat
        cotangents = _cotangents(ctx, _float_parts(flat), grads)
        mask = flat.per_input(ctx.needs_input_grad[1:])
        with frames_again(ctx.frames):
            return (None, *_pulled(flat, mask, flat.tags, ctx.saved_tensors, cotangents))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        flat: Flat = ctx.flat
        results: list[Any] = [None] * len(ctx.shapes)
        floats = _float_parts(flat)
        if not floats:
            return tuple(results)
        parts = ctx.saved_tensors
        moved = flat.per_input([tangent is not None for tangent in tangents[1:]])
        given = [
            torch.zeros_like(part) if tangent is None else tangent.contiguous()
            for part, tangent, m in zip(parts, tangents[1:], flat.per_part(moved), strict=True)
            if m
        ]
        found, _ = call(flat.pushforward(moved, flat.tags), [*parts, *given])
        for part, tangent in zip(floats, found, strict=True):
            results[part] = tangent
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, flat: Flat, *parts: torch.Tensor) -> Any:
        dims = in_dims[1:]
        mapped = flat.per_input([dim is not None for dim in dims])
        moved = [
            _in_front(part, dim, info.batch_size) if m else part
            for part, dim, m in zip(parts, dims, flat.per_part(mapped), strict=True)
        ]
        outputs, _ = call(flat.batched(mapped, info.batch_size, flat.tags), moved)
        return tuple(outputs), (0,) * len(outputs)


def _in_front(part: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    if dim is None:
        return part.unsqueeze(0).expand(size, *part.shape).contiguous()
    return part.movedim(dim, 0).contiguous()


def _float_parts(flat: Flat) -> list[int]:
    """Indices of the output parts that have a derivative."""
    found: list[int] = []
    position = 0
    for leaf, node in zip(flat.program.outputs, flat.base.results, strict=True):
        w = 1 if flat.inline else width(leaf)
        if _is_float(node):
            found += range(position, position + w)
        position += w
    return found
