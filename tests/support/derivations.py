"""Derivations by torch.func and autograd, as layers that keep a function's signature.

A layer takes a function of tensors that returns a tuple of tensors, and gives another one of the same
tensors. So layers stack in any order, transforms of the library between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
from torch.autograd import forward_ad

from torchard.functional.core.tensor_spec import is_inexact, is_inexact_dtype

__all__ = ["DERIVATIONS", "FORWARD", "OUTERMOST", "Derivation", "batched", "floating"]

Fn = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Derivation:
    """A layer, what it is called in the text of a case, and how many derivatives deep it goes."""

    name: str
    apply: Callable[[Fn], Fn]
    order: int = 0

    def __call__(self, fn: Fn) -> Fn:
        return self.apply(fn)


def floating(values: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(values) if is_inexact(x))


def real_square(x: torch.Tensor) -> torch.Tensor:
    return (x * x.conj()).real if x.is_complex() else x * x


def loss(fn: Fn) -> Callable[..., torch.Tensor]:
    """One real number of all floating results."""

    def total(*xs: torch.Tensor) -> torch.Tensor:
        return sum((real_square(o).sum() for o in fn(*xs) if is_inexact(o)), start=0)  # type: ignore[arg-type]

    return total


def _grad(fn: Fn) -> Fn:
    return lambda *xs: torch.func.grad(loss(fn), floating(xs))(*xs)


def _value_and_grad(fn: Fn) -> Fn:
    def both(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grads, value = torch.func.grad_and_value(loss(fn), floating(xs))(*xs)
        return (value, *grads)

    return both


def _floating_part(fn: Fn, xs: tuple[torch.Tensor, ...]) -> tuple[Fn, tuple[torch.Tensor, ...]]:
    """fn of its floating tensors alone, and floating results alone; and where."""
    at = floating(xs)

    def part(*some: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = list(xs)
        for i, x in zip(at, some, strict=True):
            whole[i] = x
        return tuple(o for o in fn(*whole) if is_inexact(o))

    return part, tuple(xs[i] for i in at)


def _tangents(at: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.detach().cos() for x in at)


def _jvp(fn: Fn) -> Fn:
    def pushed(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part, at = _floating_part(fn, xs)
        values, tangents = torch.func.jvp(part, at, _tangents(at))
        return (*values, *tangents)

    return pushed


def _first_only(fn: Fn) -> Fn:
    """jvp along the first floating tensor: the others' tangents are known to be zero."""

    def pushed(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part, (first, *rest) = _floating_part(fn, xs)
        return torch.func.jvp(lambda x: part(x, *rest), (first,), _tangents((first,)))[1]

    return pushed


def _vjp(fn: Fn) -> Fn:
    def pulled(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part, at = _floating_part(fn, xs)
        values, pull = torch.func.vjp(part, *at)
        return (*values, *pull(tuple(o.detach().cos() for o in values)))

    return pulled


def _hvp(fn: Fn) -> Fn:
    """Forward over reverse."""
    return _jvp(_grad(fn))


def _hvp_by_gradients(fn: Fn) -> Fn:
    """Reverse over reverse."""
    return _grad(_grad(fn))


def _laplacian(fn: Fn) -> Fn:
    """The trace of the Hessian in the first floating tensor, by forward over reverse."""

    def summed(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = floating(xs)[0]
        n = xs[first].numel()
        matrix = torch.func.jacfwd(torch.func.jacrev(loss(fn), first), first)(*xs)
        return (matrix.reshape(n, n).diagonal().sum(),)

    return summed


def _jacobian(fn: Fn) -> Fn:
    def jacobian(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part, (first, *rest) = _floating_part(fn, xs)
        found: tuple[torch.Tensor, ...] = torch.func.jacrev(lambda x: part(x, *rest))(first)
        return found

    return jacobian


def batched(rng: Random, tensors: int) -> Derivation:
    """vmap over a batch of two made of each tensor, along any dim of it, or of none but one."""
    mapped = [rng.random() < 0.7 for _ in range(tensors)]
    mapped[rng.randrange(tensors)] = True
    places, out = [rng.randint(-9, 9) for _ in range(tensors)], rng.randint(-9, 9)

    def apply(fn: Fn) -> Fn:
        def run(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            dims = tuple(
                _place(p, x.ndim) if m else None
                for p, m, x in zip(places, mapped, xs, strict=True)
            )
            batch = [
                x if d is None else torch.stack([x, _other(x)], d)
                for x, d in zip(xs, dims, strict=True)
            ]
            outs: list[int] = []

            def one(each: torch.Tensor, *some: torch.Tensor) -> tuple[torch.Tensor, ...]:
                found = fn(*some)
                outs[:] = [_place(out, o.ndim) % (o.ndim + 1) for o in found]
                # Where a result is no batch, torch is right about the front alone: be one.
                return tuple(
                    torch.where(each, o, o) if at else o for at, o in zip(outs, found, strict=True)
                )

            each = torch.ones(2, dtype=torch.bool)
            # Twice: where the batch may stand in the results depends on their ranks.
            torch.vmap(one, (0, *dims))(each, *batch)
            found: tuple[torch.Tensor, ...] = torch.vmap(one, (0, *dims), tuple(outs))(each, *batch)
            return found

        return run

    return Derivation(f"vmap({places}, {mapped}, {out})", apply)


def _place(number: int, rank: int) -> int:
    """A dim of a batch of values of that rank, counted from either end."""
    return number % (rank + 1) if number >= 0 else -1 - (-number % (rank + 1))


def _other(x: torch.Tensor) -> torch.Tensor:
    """Another value of the same kind: integers may be indices, so they stay in their range."""
    return 0.5 * x if is_inexact_dtype(x.dtype) else x.flip(0) if x.ndim else x.clone()


def _autograd(fn: Fn) -> Fn:
    return lambda *xs: _by_autograd(loss(fn), xs, once=True)


def _autograd_twice(fn: Fn) -> Fn:
    return lambda *xs: _by_autograd(loss(fn), xs, once=False)


def _by_autograd(
    total: Callable[..., torch.Tensor], xs: tuple[torch.Tensor, ...], once: bool
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() if is_inexact(x) else x for x in xs]
    wanted = [x for x in leaves if x.requires_grad]
    value = total(*leaves)
    if not value.requires_grad:
        return tuple(torch.zeros_like(x) for x in wanted)
    grads = _gradients(value, wanted, not once)
    again = sum((real_square(g).sum() for g in grads), start=torch.zeros(()))
    if not once and again.requires_grad:
        grads = _gradients(again, wanted, False)
    return tuple(g.detach() for g in grads)


def _dual_numbers(fn: Fn) -> Fn:
    """Tangents by torch.autograd.forward_ad."""

    def pushed(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with forward_ad.dual_level():
            at = tuple(forward_ad.make_dual(x, x.cos()) if is_inexact(x) else x for x in xs)
            pairs = [forward_ad.unpack_dual(o) for o in fn(*at) if is_inexact(o)]
        return tuple(torch.zeros_like(p) if t is None else t for p, t in pairs)

    return pushed


def _gradients(
    value: torch.Tensor, wanted: list[torch.Tensor], create_graph: bool
) -> tuple[torch.Tensor, ...]:
    found = torch.autograd.grad(value, wanted, create_graph=create_graph, allow_unused=True)
    pairs = zip(found, wanted, strict=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in pairs)


def _amid(fn: Fn) -> Fn:
    """Operations before and after: what a transform inside is given and returns is no end of a trace."""

    def amid(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = fn(*(x * 0.75 + 0.1 if is_inexact(x) else x for x in xs))
        return tuple(o.sin() * 2 if is_inexact(o) else o for o in found)

    return amid


def _twice(fn: Fn) -> Fn:
    """Two calls, of which the second has less of each number; all the results of both."""

    def twice(*xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*fn(*xs), *fn(*(x * 0.5 if is_inexact(x) else x for x in xs)))

    return twice


DERIVATIONS = tuple(
    Derivation(apply.__name__.strip("_"), apply, order)
    for order, several in enumerate(
        (
            (_amid, _twice),
            (_grad, _value_and_grad, _jvp, _first_only, _vjp, _jacobian),
            (_hvp, _hvp_by_gradients, _laplacian),
        )
    )
    for apply in several
)

# torch.autograd and dual levels belong outside: transforms refuse them inside by name.
OUTERMOST = tuple(
    Derivation(apply.__name__.strip("_"), apply, order)
    for order, apply in ((1, _autograd), (2, _autograd_twice), (1, _dual_numbers))
)

# Those with forward mode in them.
FORWARD = ("jvp", "first_only", "hvp", "laplacian", "dual_numbers")
