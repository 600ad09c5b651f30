"""Examples of a batch do not depend on one another, nor on their order in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.testing.calls import law, saying_that_it_draws
from torchard.testing.derived import ALL_ORDERS
from torchard.testing.laws.sides import (
    agree,
    along,
    changed,
    check_results,
    map_dims,
    map_results,
    of_each,
    size_of,
)
from torchard.testing.report import Report

__all__ = ["batch_independent", "permutation_equivariant", "permutation_invariant"]


@law
def batch_independent(
    fn: Callable[..., Any],
    *args: Any,
    in_dims: int | Sequence[Any] = 0,
    out_dim: int | Sequence[Any] = 0,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that an example's result does not depend on other examples, on its position or on their
    number.

    For each pair of examples, results of one are compared while the other is changed: halves of the batch
    are changed at a time, so that 64 examples take 12 calls. Up to four examples are also computed
    singly, and a larger batch without its first example. So statistics over the batch are found, in
    derivatives too.

    Args:
        fn: a function of pytrees, over a batch of two examples at least.
        args: its arguments.
        in_dims: the dim of examples in each argument, as for ``torch.vmap``: a number for all, or a list
            with None for arguments that all examples share, such as parameters.
        out_dim: the dim of examples in results: a number for all results or, if ``fn`` returns a tuple, a
            list with one entry for each item; None skips an item.
        orders: the quantities to compare; see `equal`.

    Returns:
        A report with a row for each value; ``out[i]`` are results by the halves that change.

    Raises:
        AssertionError: an example depends on others, or fn fails on a single one; the message is the
            report.
        ValueError: arguments and results have no common number of examples.

    >>> import torch
    >>> from torchard.testing import batch_independent
    >>> x = torch.tensor([[0.5, 2.0], [-1.0, 0.25], [3.0, 1.0]])
    >>> batch_independent(lambda x: x - x.mean(1, keepdim=True), x).good
    True
    >>> batch_independent(lambda x: x - x.mean(0), x)
    Traceback (most recent call last):
        ...
    torchard.Differs: examples of a batch depend on other examples, fn differs when these change:
    ...
    """
    dims = of_each("batch_independent", "in_dims", in_dims, args)
    count = size_of("batch_independent", "in_dims", args, dims)
    check_results("batch_independent", fn(*args), out_dim, count, "examples")
    compared = functools.partial(map_results, lambda y, _: y, out_dim)

    def kept(rows: torch.Tensor, seed: int, xs: Any) -> Any:
        return fn(*map_dims(lambda x, d: x.where(along(rows, x, d), changed(x, seed)), xs, dims))

    def among_others(bit: int, xs: Any) -> Any:
        """All results, each while every example whose place differs in this bit is changed."""
        these, those = halves[bit]
        results = kept(these, 2 * bit, xs), kept(those, 2 * bit + 1, xs)
        return map_results(lambda y, z, d: y.where(along(these, y, d), z), out_dim, *results)

    bits = range((count - 1).bit_length())  # of two places one differs
    ones = [torch.arange(count) >> bit & 1 == 1 for bit in bits]
    halves = [(rows, ~rows) for rows in ones]
    law = "examples of a batch depend on other examples, fn differs when these change"
    with saying_that_it_draws(fn, args):
        report = agree(
            law,
            lambda *xs: [among_others(bit, xs) for bit in bits],
            lambda *xs: [compared(fn(*xs))] * len(bits),
            args,
            orders,
        )
        return report + _of_smaller_batches(fn, args, dims, count, out_dim, orders)


_ALONE = 4  # examples that are computed alone, at most


def _of_smaller_batches(
    fn: Callable[..., Any], args: Any, dims: Any, count: int, out_dim: Any, orders: Sequence[str]
) -> Report:
    """Examples alone, and all but the first, each in the place before its own."""
    last, number = count - 1, min(count, _ALONE)
    rows = [round(i * last / (number - 1)) for i in range(number)]
    parts = [(row, 1) for row in rows] + ([(1, last)] if count > _ALONE else [])

    def smaller(*xs: Any) -> Any:
        found = [fn(*map_dims(functools.partial(_part, part=p), xs, dims)) for p in parts]
        return [map_results(lambda y, _: y, out_dim, result) for result in found]

    def whole(*xs: Any) -> Any:
        result = fn(*xs)
        return [map_results(functools.partial(_part, part=p), out_dim, result) for p in parts]

    try:
        smaller(*args)
    except Exception as error:  # whatever fn raises, of a batch it takes
        raise AssertionError(
            f"examples of a batch depend on their number: fn takes {count} examples, and with fewer it "
            f"raises {type(error).__name__}: {error}. Statistics over a batch, such as those of "
            "BatchNorm in training, need other examples: test module.eval(), or squeeze no dim of "
            "examples."
        ) from error
    law = "examples of a batch depend on their position or number, fn differs for smaller batches"
    return agree(law, smaller, whole, args, orders)


def _part(x: torch.Tensor, dim: int, part: tuple[int, int]) -> torch.Tensor:
    start, length = part
    return x.narrow(dim, start, length)


@law
def permutation_equivariant(
    fn: Callable[..., Any],
    *args: Any,
    in_dims: int | Sequence[Any] = 0,
    out_dims: int | Sequence[int] = 0,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that permuting the elements of a set, or the nodes of a graph, permutes the results.

    Two permutations are tried, which generate all others: the first two elements are swapped, and all are
    shifted by one. If arguments have equal elements, a sort or a maximum chooses one of them, and its
    derivatives may differ: such derivatives are compared again at arguments that are all different.

    Args:
        fn: a function of pytrees.
        args: its arguments.
        in_dims: the dim of elements in each argument: a number for all arguments, or a list with a
            number, a tuple of dims, or None (not permuted) for each: ``[0, (0, 1)]`` for nodes and an
            adjacency matrix.
        out_dims: the dim of elements in results, in the same form.
        orders: the quantities to compare; see `equal`.

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
    """Assert that permuting the elements of a set, or the nodes of a graph, does not change the results.

    Derivatives at ties, such as those of a sort, are compared as `permutation_equivariant` does.

    Args:
        fn: a function of pytrees.
        args: its arguments.
        in_dims: the dim of elements in each argument; see `permutation_equivariant`.
        orders: the quantities to compare; see `equal`.

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
    who = f"permutation_{what}"
    dims = of_each(who, "in_dims", in_dims, args)
    count = size_of(who, "in_dims", args, dims)
    report = Report()
    for name, order in _generators(count).items():

        def move(x: torch.Tensor, dim: int, order: list[int] = order) -> torch.Tensor:
            return x.index_select(dim, torch.tensor(order, device=x.device))

        def permuted_before(*xs: Any, move: Any = move) -> Any:
            return fn(*map_dims(move, xs, dims))

        def permuted_after(*xs: Any, move: Any = move) -> Any:
            return map_dims(move, (fn(*xs),), [out_dims])[0]

        law = f"not {what} under permutations, fn differs when {name}"
        with saying_that_it_draws(fn, args):
            report += agree(law, permuted_before, permuted_after, args, orders, ties=True)
    return report


def _generators(count: int) -> dict[str, list[int]]:
    swap, cycle = [1, 0, *range(2, count)], [*range(1, count), 0]
    moves = {"the first two are swapped": swap}
    return moves if swap == cycle else {**moves, "all are shifted by one": cycle}
