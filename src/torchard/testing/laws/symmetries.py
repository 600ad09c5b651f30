"""Symmetries of a function, as laws: invariance, equivariance and homogeneity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchard.functional.core import tree
from torchard.functional.core.tensor_spec import is_inexact
from torchard.testing.calls import law
from torchard.testing.derived import ALL_ORDERS
from torchard.testing.laws.sides import agree
from torchard.testing.report import Report

__all__ = ["equivariant", "homogeneous", "invariant"]


@law
def invariant(
    fn: Callable[..., Any],
    action: Callable[..., Any],
    *args: Any,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that ``fn(action(*args)) == fn(*args)``, in values and derivatives, up to rounding.

    Derivatives that differ at ties, such as those of a sort, are compared at elements that all differ.

    Args:
        fn: a function of pytrees.
        action: a function from the arguments to a tuple of arguments: a permutation, a shift, a rotation.
        args: arguments of both.
        orders: the quantities to compare; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: the function is not invariant; the message is the report.
        TypeError: ``action`` returns no tuple.

    >>> import torch
    >>> from torchard.testing import invariant
    >>> x = torch.tensor([0.5, 2.0, -1.0])
    >>> invariant(lambda x: x.softmax(0), lambda x: (x + 3,), x).good     # of shifts
    True
    """
    law = "not invariant, fn(action(*args)) differs from fn(*args)"
    return agree(law, _after("invariant", "action", action, fn), fn, args, orders, ties=True)


@law
def equivariant(
    fn: Callable[..., Any],
    before: Callable[..., Any],
    after: Callable[..., Any],
    *args: Any,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that ``fn(before(*args)) == after(fn(*args))``, in values and derivatives, up to rounding.

    Derivatives that differ at ties, such as those of a sort, are compared at elements that all differ.

    Args:
        fn: a function of pytrees.
        before: a function from the arguments to a tuple of arguments.
        after: the same action on results.
        args: arguments of ``fn`` and ``before``.
        orders: the quantities to compare; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: the function is not equivariant; the message is the report.
        TypeError: ``before`` returns no tuple.

    >>> import torch
    >>> from torchard.testing import equivariant
    >>> x = torch.tensor([[0.5, 2.0], [-1.0, 1.0]])
    >>> equivariant(lambda x: x.softmax(-1), lambda x: (x.flip(0),), lambda y: y.flip(0), x).good
    True
    """
    law = "not equivariant, fn(before(*args)) differs from after(fn(*args))"
    moved = _after("equivariant", "before", before, fn)
    return agree(law, moved, lambda *xs: after(fn(*xs)), args, orders, ties=True)


def _after(who: str, name: str, action: Callable[..., Any], fn: Callable[..., Any]) -> Any:
    """A function of what an action gives, which is no tensor: its rows would be arguments."""

    def moved(*args: Any) -> Any:
        found = action(*args)
        if not isinstance(found, tuple | list):
            raise TypeError(
                f"{who}: {name} returned a {type(found).__name__}; it must return a tuple of all "
                "arguments of fn, even of a single one: lambda x: (x.flip(0),)."
            )
        return fn(*found)

    return moved


@law
def homogeneous(
    fn: Callable[..., Any],
    degree: float,
    *args: Any,
    scale: float = 2.0,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that ``fn`` of scaled arguments is its result times ``scale ** degree``.

    Results that are not floating (the indices of the largest, say) must not change.

    Args:
        fn: a function of pytrees.
        degree: 1 for linear functions, 0 for normalisations, -1 for reciprocals.
        args: its arguments; floating tensors are scaled.
        scale: a positive number; scaling by a power of two does not round.
        orders: the quantities to compare; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: the function is not homogeneous; the message is the report.

    >>> import torch
    >>> from torchard.testing import homogeneous
    >>> homogeneous(lambda x: x / x.norm(), 0, torch.tensor([3.0, 4.0])).good
    True
    """
    if not scale > 0 or scale == 1:
        raise ValueError(f"homogeneous: scale is {scale:g}; it must be a positive number other than 1.")

    def scaled(value: Any, factor: float) -> Any:
        # Not times a number: forward mode makes doubles of that and a value without dims.
        return tree.map(lambda x: x * x.new_full((), factor) if is_inexact(x) else x, value)

    return agree(
        f"not homogeneous of degree {degree:g}, fn of scaled arguments differs from its scaled result",
        lambda *xs: fn(*scaled(xs, scale)),
        lambda *xs: scaled(fn(*xs), scale**degree),
        args,
        orders,
    )
