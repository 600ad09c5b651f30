"""Examples of a batch do not depend on one another, nor on their order in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.testing.calls import as_function, law
from torchard.testing.derived import ALL_ORDERS
from torchard.testing.laws.sides import agree, changed, map_dims, of_each, size_of
from torchard.testing.report import Report

__all__ = ["batch_independent", "permutation_equivariant", "permutation_invariant"]


@law
def batch_independent(
    fn: Callable[..., Any],
    *args: Any,
    in_dims: int | Sequence[Any] = 0,
    out_dim: int = 0,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that an example's result depends on no other example, nor on its place or their number.

    Each result is compared with that of the example among others that are changed, and with that of a
    batch of this example alone. So statistics over the batch are found, in derivatives too.

    Args:
        fn: a function of pytrees, over a batch of two examples at least.
        args: its arguments.
        in_dims: the dim of examples in each argument, as for ``torch.vmap``: a number for all, or a list
            with None for arguments that all examples share, such as parameters.
        out_dim: that of results.
        orders: what is compared; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: an example depends on others; the message is the report.
        ValueError: arguments have no common number of examples.

    >>> import torch
    >>> from torchard.testing import batch_independent
    >>> x = torch.tensor([[0.5, 2.0], [-1.0, 0.25], [3.0, 1.0]])
    >>> batch_independent(lambda x: x - x.mean(1, keepdim=True), x).good
    True
    >>> batch_independent(lambda x: x - x.mean(0), x)
    Traceback (most recent call last):
        ...
    torchard.Differs: examples of a batch depend on what the others are, fn differs when they change:
    ...
    """
    f = as_function(fn)
    dims = of_each("batch_independent", "in_dims", in_dims, args)
    count = size_of("batch_independent", "in_dims", args, dims)

    def example(result: Any, at: int) -> Any:
        return tree.map(lambda y: y.narrow(out_dim, at, 1), result)

    def each(one: Callable[[int, Any], Any]) -> Callable[..., Any]:
        return lambda *xs: _joined([one(i, xs) for i in range(count)], out_dim)

    def among_others(i: int, xs: Any) -> Any:
        return example(f(*map_dims(lambda x, d: _only(x, d, i), xs, dims)), i)

    def alone(i: int, xs: Any) -> Any:
        return example(f(*map_dims(lambda x, d: x.narrow(d, i, 1), xs, dims)), 0)

    law = "examples of a batch depend on what the others are, fn differs when they change"
    report = agree(law, f, each(among_others), args, orders)
    law = "examples of a batch depend on their place or number, fn differs for batches of one"
    return report + agree(law, f, each(alone), args, orders)


@law
def permutation_equivariant(
    fn: Callable[..., Any],
    *args: Any,
    in_dims: int | Sequence[Any] = 0,
    out_dims: int | Sequence[int] = 0,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that permuted elements of a set, or nodes of a graph, give results permuted alike.

    Two permutations are tried, which generate all others: the first two elements change places, and all
    move on by one.

    Args:
        fn: a function of pytrees.
        args: its arguments.
        in_dims: the dim of elements in each argument: a number for all, or a list of numbers, None for
            what is not permuted, and tuples of dims: ``[0, (0, 1)]`` of nodes and an adjacency matrix.
        out_dims: that of results, or several.
        orders: what is compared; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: the function is not equivariant; the message is the report.
        ValueError: arguments have no common number of elements, or fewer than two.

    >>> import torch
    >>> from torchard.testing import permutation_equivariant
    >>> x, edges = torch.tensor([0.5, 2.0, -1.0]), torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 1, 0]])
    >>> permutation_equivariant(lambda x, a: a @ x + x, x, edges, in_dims=[0, (0, 1)]).good
    True
    """
    return _permuted("equivariant", fn, args, in_dims, out_dims, orders)


@law
def permutation_invariant(
    fn: Callable[..., Any],
    *args: Any,
    in_dims: int | Sequence[Any] = 0,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that permuted elements of a set, or nodes of a graph, give the same results.

    Args:
        fn: a function of pytrees.
        args: its arguments.
        in_dims: the dim of elements in each argument; see `permutation_equivariant`.
        orders: what is compared; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: the function is not invariant; the message is the report.
        ValueError: arguments have no common number of elements, or fewer than two.

    >>> import torch
    >>> from torchard.testing import permutation_invariant
    >>> permutation_invariant(lambda x: x.amax(0), torch.tensor([0.5, 2.0, -1.0])).good
    True
    """
    return _permuted("invariant", fn, args, in_dims, None, orders)


def _permuted(
    what: str, fn: Any, args: Any, in_dims: Any, out_dims: Any, orders: Sequence[str]
) -> Report:
    f, who = as_function(fn), f"permutation_{what}"
    dims = of_each(who, "in_dims", in_dims, args)
    count = size_of(who, "in_dims", args, dims)
    report = Report()
    for name, order in _generators(count).items():

        def move(x: torch.Tensor, dim: int, order: list[int] = order) -> torch.Tensor:
            return x.index_select(dim, torch.tensor(order, device=x.device))

        def permuted_before(*xs: Any, move: Any = move) -> Any:
            return f(*map_dims(move, xs, dims))

        def permuted_after(*xs: Any, move: Any = move) -> Any:
            return map_dims(move, (f(*xs),), [out_dims])[0]

        law = f"not {what} under permutations, fn differs when {name}"
        report += agree(law, permuted_before, permuted_after, args, orders)
    return report


def _generators(count: int) -> dict[str, list[int]]:
    swap, cycle = [1, 0, *range(2, count)], [*range(1, count), 0]
    moves = {"the first two change places": swap}
    return moves if swap == cycle else {**moves, "all move on by one": cycle}


def _only(x: torch.Tensor, dim: int, i: int) -> torch.Tensor:
    """The example i of a batch, among others that are changed."""
    others = changed(x, seed=i)
    size = x.shape[dim]
    parts = others.narrow(dim, 0, i), x.narrow(dim, i, 1), others.narrow(dim, i + 1, size - i - 1)
    return torch.cat(parts, dim)


def _joined(results: list[Any], dim: int) -> Any:
    return tree.map(lambda *each: torch.cat(each, dim), *results)
