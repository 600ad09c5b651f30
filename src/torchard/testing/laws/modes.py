"""Products with the derivative of a function of tensors, in forward and in reverse mode.

Both are plain autograd: it takes every autograd.Function, functions that call torch.autograd.grad or
torch.func themselves, and costs a third of torch.func's transforms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import forward_ad

from torchard.testing.derived import check_differentiable, cotangent, nodes_of

__all__ = [
    "Fn",
    "ForwardGradient",
    "Gradient",
    "Vector",
    "along",
    "in_some",
    "inner",
    "pullback",
    "pushed",
]

Vector = tuple[torch.Tensor, ...]
Fn = Callable[..., Vector]


def inner(xs: Vector, ys: Vector) -> torch.Tensor:
    """The real inner product."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(xs, ys, strict=True):
        total = total + ((x.conj() * y).real if x.is_complex() else x * y).sum().to(total.device)
    return total


def along(xs: Vector, direction: Vector) -> torch.Tensor:
    """`inner`, of what a direction has a part in: infinities and NaNs times zero are zero."""
    return inner(tuple(x.where(v != 0, 0) for x, v in zip(xs, direction, strict=True)), direction)


def pushed(fn: Fn, at: Vector, direction: Vector) -> Vector:
    """J v, in forward mode.

    Raises:
        NotImplementedError: an operation or autograd.Function has no forward mode.
    """
    call = fn.differentiable if isinstance(fn, Gradient) else fn
    try:
        with forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(x.detach().requires_grad_(call is not fn), v)
                for x, v in zip(at, direction, strict=True)
            ]
            return tuple(_tangent(result) for result in call(*duals))
    except RuntimeError as error:
        if "Nested forward mode AD" not in str(error):
            raise
    # fn takes forward derivatives itself, by torch.func, which nests only in itself.
    tangents: Vector = torch.func.jvp(_by_transforms(fn), at, direction)[1]
    return tangents


def _tangent(dual: torch.Tensor) -> torch.Tensor:
    value, tangent = forward_ad.unpack_dual(dual)
    return torch.zeros_like(value) if tangent is None else tangent.detach().clone()


def in_some(fn: Fn, at: Vector, some: list[bool], cotangents: Vector) -> Vector | None:
    """J' c with respect to some arguments, when others require no gradients; None without Functions.

    The backward of an autograd.Function may ask by ``ctx.needs_input_grad``, torch's own do so rightly.
    """
    leaves = tuple(x.detach().requires_grad_(s) for x, s in zip(at, some, strict=True))
    with torch.enable_grad():
        results = fn(*leaves)
    if not any(isinstance(n, torch.autograd.function.BackwardCFunction) for n in nodes_of(results)):
        return None
    taken = tuple(x for x in leaves if x.requires_grad)
    return _pulled(results, taken, cotangents, create_graph=False)


def pullback(fn: Fn, at: Vector) -> Callable[[Vector], Vector]:
    """The function that takes c to J' c, in reverse mode."""
    leaves = tuple(x.detach().requires_grad_() for x in at)
    with torch.enable_grad():
        results = fn(*leaves)
    if isinstance(fn, Gradient):
        check_differentiable(results)
    return lambda cotangents: _pulled(results, leaves, cotangents, create_graph=False)


def _pulled(results: Vector, at: Vector, cotangents: Vector, create_graph: bool) -> Vector:
    pairs = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, at))
    outputs, weights = zip(*pairs, strict=True)
    return torch.autograd.grad(
        outputs,
        at,
        weights,
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
        materialize_grads=True,
    )


@dataclass(frozen=True)
class Gradient:
    """The gradient of <c, fn>, in reverse mode; it can be differentiated in each mode."""

    fn: Fn
    cotangents: Vector

    def __call__(self, *xs: torch.Tensor) -> Vector:
        further = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
        at = xs if further else tuple(x.detach().requires_grad_() for x in xs)
        return self._of(at, create_graph=further)

    def differentiable(self, *xs: torch.Tensor) -> Vector:
        """The same, of tensors that require gradients: torch's backwards may lose tangents otherwise."""
        return self._of(xs, create_graph=True)

    def _of(self, xs: Vector, create_graph: bool) -> Vector:
        with torch.enable_grad():
            cotangents = tuple(cotangent(c, create_graph) for c in self.cotangents)
            return _pulled(self.fn(*xs), xs, cotangents, create_graph)

    def by_transforms(self, *xs: torch.Tensor) -> Vector:
        """The same by torch.func, whose levels nest."""
        fn = _by_transforms(self.fn)
        gradient: Vector = torch.func.vjp(fn, *xs)[1](self.cotangents)
        return gradient


def _by_transforms(fn: Fn) -> Fn:
    return fn.by_transforms if isinstance(fn, Gradient) else fn


@dataclass(frozen=True)
class ForwardGradient:
    """The gradient of <c, fn>, entry by entry in forward mode."""

    fn: Fn
    cotangents: Vector

    def __call__(self, *xs: torch.Tensor) -> Vector:
        def product(*ys: torch.Tensor) -> torch.Tensor:
            return inner(self.cotangents, self.fn(*ys))

        gradient: Vector = torch.func.jacfwd(product, tuple(range(len(xs))))(*xs)
        return gradient
