"""The gradient of a pattern, as a pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.kernels.dims import Dims
from torchard.kernels.pattern import Pattern
from torchard.kernels.skeleton import same_form

__all__ = ["gradients_of"]


def gradients_of(pattern: Pattern) -> list[Pattern]:
    """Of the inputs they depend on and a cotangent for each floating output, the gradients.

    As torch spells them, and once more as it does where they are to be differentiated again (as all of
    torch.func's may be) if that is another form. None if there is none.
    """
    once = _gradient_of(pattern, again=False)
    if once is None:
        return []
    again = _gradient_of(pattern, again=True)
    return [once] if again is None or _alike(once, again) else [once, again]


def _alike(one: Pattern, other: Pattern) -> bool:
    """Whether what one finds, the other does."""
    a, b = one.alternatives[0], other.alternatives[0]
    if not same_form(a.skeleton, b.skeleton):
        return False
    if a.rounded is None or b.rounded is None:
        return a.rounded is b.rounded
    return same_form(a.rounded, b.rounded, rounding=True)


def _gradient_of(pattern: Pattern, again: bool) -> Pattern | None:
    """Of an input that no gradient reads (a bias that is only added) the shape alone is needed, which the
    dims say; without dims it stays an input.
    """
    specs, program = pattern.alternatives[0].example
    floating = [i for i, (_, dtype) in enumerate(specs) if dtype.is_floating_point]
    outputs = [node.meta["val"] for node in program.results]
    followed = [j for j, val in enumerate(outputs) if val.dtype.is_floating_point]
    if not floating or not followed:
        return None
    full = _full(pattern, floating, followed, again)
    dims = _dims(pattern.dims, floating, followed)
    whole = _Function(full, pattern, range(len(specs)), len(followed), range(len(floating)), dims)
    found = whole.pattern(dims)
    distinct = _distinct(found)
    used = range(len(specs)) if dims is None else _used(found, len(specs))
    if len(used) == len(specs) and len(distinct) == len(floating):
        return found
    kept = None if dims is None else _kept(dims, used, distinct, len(specs))
    return _Function(full, pattern, used, len(followed), distinct, dims).pattern(kept)


def _full(
    pattern: Pattern, floating: list[int], followed: list[int], again: bool
) -> Callable[..., Any]:
    def gradients(
        inputs: list[Any], cotangents: list[Any], literals: dict[str, Any]
    ) -> tuple[Any, ...]:
        with torch.enable_grad():
            given = list(inputs)
            for i in floating:
                given[i] = inputs[i].detach().requires_grad_()
            out = pattern.fn(*given, **literals)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        moving = [given[i] for i in floating]
        found = torch.autograd.grad(
            [outs[j] for j in followed],
            moving,
            cotangents,
            create_graph=again,
            materialize_grads=True,
        )
        return tuple(g.detach() for g in found)

    return gradients


class _Function:
    """Some of the gradients as a function of some inputs and the cotangents."""

    def __init__(
        self,
        full: Callable[..., Any],
        pattern: Pattern,
        used: Sequence[int],
        cotangents: int,
        returned: Sequence[int],
        dims: Dims | None,
    ) -> None:
        self.full, self.of, self.used, self.returned = full, pattern, list(used), returned
        self.cotangents, self.dims = cotangents, dims

    def pattern(self, dims: Dims | None) -> Pattern:
        """The pattern of it."""
        names = [self.of.inputs[i] for i in self.used]
        names += [f"cotangent_{j}" for j in range(self.cotangents)]
        weights = [self.of.inputs[i] for i in self.of.weights]
        name = f"{self.of.name}_backward"
        return Pattern.of(self, name, names, self.of.literals, dims, weights)

    def __call__(self, *tensors: torch.Tensor, **literals: Any) -> Any:
        given = dict(zip(self.used, tensors, strict=False))
        inputs = [given.get(i) for i in range(len(self.of.inputs))]
        if len(given) < len(inputs):
            assert self.dims is not None
            cotangents = tensors[len(self.used) :]
            known = [None if x is None else tuple(x.shape) for x in (*inputs, *cotangents)]
            shapes = self.dims.complete(known)[: len(inputs)]
            for i, shape in enumerate(shapes):
                if inputs[i] is None:
                    inputs[i] = cotangents[0].new_zeros(shape)
        found = self.full(inputs, list(tensors[len(self.used) :]), literals)
        return tuple(found[j] for j in self.returned)


def _used(pattern: Pattern, count: int) -> list[int]:
    """The inputs that a gradient reads."""
    skeleton = pattern.alternatives[0].skeleton
    read = frozenset().union(*map(skeleton.reads, skeleton.roots))
    return [i for i in range(count) if i in read]


def _distinct(pattern: Pattern) -> list[int]:
    """The gradients without those that are another one: of a sum's operands one is enough."""
    skeleton = pattern.alternatives[0].skeleton
    roots = list(zip(skeleton.roots, skeleton.accesses, strict=True))
    return [j for j, root in enumerate(roots) if root not in roots[:j]]


def _dims(dims: Dims | None, floating: list[int], followed: list[int]) -> Dims | None:
    """A gradient is like its input, a cotangent like its output."""
    if dims is None:
        return None
    cotangents = [dims.outputs[j] for j in followed]
    return Dims(
        dims.text + " backward",
        (*dims.inputs, *cotangents),
        tuple(dims.inputs[i] for i in floating),
        (*dims.dtypes, *[torch.float32 for _ in followed]),
        dims.whole,
    )


def _kept(dims: Dims, used: Sequence[int], returned: Sequence[int], count: int) -> Dims:
    kept = [*used, *range(count, len(dims.inputs))]
    return Dims(
        dims.text,
        tuple(dims.inputs[i] for i in kept),
        tuple(dims.outputs[j] for j in returned),
        tuple(dims.dtypes[i] for i in kept),
        dims.whole,
    )
