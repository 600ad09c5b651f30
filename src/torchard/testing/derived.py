"""Derivatives of a function as functions of its arguments, so that they are compared as values are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from torchard.functional.core import tree
from torchard.functional.core.placed import is_placed
from torchard.sharding import MeshTensor, place
from torchard.testing.rounding.roundings import is_float

__all__ = ["ALL_ORDERS", "Derivatives", "as_primal", "check_orders", "derived", "fixed_direction"]

Fn = Callable[..., Any]


class Derivatives(dict[str, torch.Tensor]):
    """Derivatives by what they are of."""


tree.register(
    Derivatives,
    lambda node: (list(node.values()), tuple(node)),
    lambda names, values: Derivatives(zip(names, values, strict=True)),
)


def derived(fn: Fn, order: str) -> Fn:
    """What is compared of a function.

    Args:
        fn: a function of pytrees.
        order: one of `ALL_ORDERS`. Derivatives are of the floating results times fixed cotangents, with
            respect to the floating leaves of all arguments.

    Returns:
        A function of the same arguments. It returns `Derivatives`, with a tensor for each of those leaves
        (for "jvp", for each floating result). "second" cannot be differentiated further.
    """
    return _ORDERS[order](fn)


def check_orders(orders: Sequence[str]) -> None:
    """Check what a law is asked to compare.

    Raises:
        ValueError: nothing, or a word that is no order.
    """
    for order in orders:
        if order not in _ORDERS:
            raise ValueError(f"orders has {order!r}; it lists some of {', '.join(map(repr, ALL_ORDERS))}")
    if not orders:
        raise ValueError(f"orders is empty; it lists some of {', '.join(map(repr, ALL_ORDERS))}")


def _value(fn: Fn) -> Fn:
    return fn


def _gradient(fn: Fn, last: bool = False) -> Fn:
    """The gradient; the last one cannot be differentiated: nothing is prepared that nobody takes."""

    def gradient(*args: Any) -> Derivatives:
        part = _FloatingPart(fn, args)
        results, pull, *_ = torch.func.vjp(part, *part.leaves)
        with torch.no_grad() if last else contextlib.nullcontext():
            gradients = part.by_path(pull(tuple(map(fixed_direction, results))))
        return Derivatives((f"gradient of {path}", g) for path, g in gradients.items())

    return gradient


def _jvp(fn: Fn) -> Fn:
    def jvp(*args: Any) -> Derivatives:
        part = _FloatingPart(fn, args)
        primals = tuple(map(as_primal, part.leaves))
        _, tangents, *_ = torch.func.jvp(part, primals, part.directions)
        return Derivatives((f"tangent of result {i}", t) for i, t in enumerate(tangents))

    return jvp


def as_primal(x: Any) -> Any:
    """The tensor, or a copy if it is expanded: torch's forward mode refuses entries that share memory."""
    expanded = any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.clone(memory_format=torch.contiguous_format) if expanded else x


def _second(fn: Fn) -> Fn:
    """The gradient of the gradient's product with a fixed direction."""

    def along(*args: Any) -> torch.Tensor:
        products = (_inner(g, fixed_direction(g)) for g in _gradient(fn)(*args).values())
        return sum(products, start=torch.zeros(()))

    def second(*args: Any) -> Derivatives:
        gradients = _gradient(along, last=True)(*args)
        return Derivatives((f"second {path}", g) for path, g in gradients.items())

    return second


_ORDERS: dict[str, Callable[[Fn], Fn]] = {
    "value": _value,
    "gradient": _gradient,
    "jvp": _jvp,
    "second": _second,
}
ALL_ORDERS = tuple(_ORDERS)


# Typed for trees alone, it takes anything.
_tree_map: Any = optree.tree_map


class _FloatingPart:
    """fn as a function of the floating tensors of its arguments, to its floating results.

    Placed arguments are tensors each, one for each shard.
    """

    def __init__(self, fn: Fn, args: tuple[Any, ...]) -> None:
        self.fn, self.args = fn, args
        floats, self.rest = tree.partition(args)
        self.leaves, self.structure = tree.flatten(floats)

    def __call__(self, *leaves: Any) -> tuple[torch.Tensor, ...]:
        args = tree.combine(tree.unflatten(self.structure, leaves), self.rest)
        results = tree.leaves(tree.whole(self.fn(*args)))
        return tuple(r for r in results if is_float(r))

    @property
    def directions(self) -> tuple[torch.Tensor, ...]:
        """Fixed tangents, those of a placed argument placed as it is."""
        directions: Any = _tree_map(
            _direction_like,
            self.args,
            is_leaf=is_placed,
            none_is_leaf=True,
            namespace=tree.NAMESPACE,
        )
        return tuple(tree.leaves(tree.partition(directions)[0]))

    def by_path(self, gradients: Sequence[Any]) -> dict[str, torch.Tensor]:
        whole = tree.whole(tree.unflatten(self.structure, gradients))
        return dict(zip(tree.paths(whole, "args"), tree.leaves(whole), strict=True))


def _direction_like(leaf: Any) -> Any:
    if isinstance(leaf, MeshTensor):
        return place(fixed_direction(leaf), leaf.mesh, leaf.spec)
    return fixed_direction(leaf) if is_float(leaf) else leaf


def _inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The real inner product."""
    return (x * y.conj()).real.sum() if x.is_complex() else (x * y).sum()


def fixed_direction(x: Any) -> Any:
    """Small integers, the same for every tensor of that shape: what is exact stays exact."""
    place = torch.arange(x.numel(), device=x.device).view(tuple(x.shape))
    parts = [_scattered(place, salt).double() for salt in range(2 if x.is_complex() else 1)]
    return (torch.complex(*parts) if x.is_complex() else parts[0]).to(x.dtype)


def _scattered(place: torch.Tensor, salt: int) -> torch.Tensor:
    """Integers of -3 to 3 that follow no pattern: multiplicative hashing (Knuth, volume 3, 6.4)."""
    return ((place + 1 + 977 * salt) * 2654435761 % 2**32 >> 13) % 7 - 3
