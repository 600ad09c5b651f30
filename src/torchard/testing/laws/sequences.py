"""Sequences: the past depends neither on the future nor on padding; scans combine associatively."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import CheckedInside
from torchard.functional.core.tensor_spec import is_inexact
from torchard.testing.calls import law
from torchard.testing.derived import ALL_ORDERS
from torchard.testing.laws.sides import (
    agree,
    changed,
    check_results,
    map_dims,
    map_results,
    of_each,
    size_of,
)
from torchard.testing.report import Report

__all__ = ["causal", "check_associative", "padding_invariant"]

# At how many positions a sequence is cut at most: the first and the last, and others between.
_CUTS = 8


@law
def causal(
    fn: Callable[..., Any],
    *args: Any,
    in_dims: int | Sequence[Any] = 1,
    out_dim: int | Sequence[Any] = 1,
    strict: bool = False,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that results at a position depend only on arguments up to that position.

    Later arguments are changed, and are constants in derivatives: results up to the position must be the
    same, and so must their gradients, which must be zero in later arguments. Sequences of more than eight
    positions are cut at eight of them.

    Args:
        fn: a function of pytrees, over sequences of at least two positions.
        args: its arguments.
        in_dims: the dim of positions in each argument: a number for all arguments, or a list with None
            for arguments that are not sequences, such as parameters.
        out_dim: the dim of positions in results: a number for all results or, if ``fn`` returns a tuple,
            a list with one entry for each item, and None for items to skip: ``[1, None]`` for a recurrent
            network with final states.
        strict: whether results must not depend on arguments at their own position either, as in
            autoregressive flows.
        orders: the quantities to compare; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: the past depends on the future; the message is the report, which names results
            by the cut: ``out[0]`` is the first.
        ValueError: arguments and results have no common number of positions.

    >>> import torch
    >>> from torchard.testing import causal
    >>> x = torch.tensor([[0.5, 2.0, -1.0, 3.0]])
    >>> causal(lambda x: x.cumsum(1), x).good
    True
    >>> causal(lambda x: x - x.mean(1, keepdim=True), x)
    Traceback (most recent call last):
        ...
    torchard.Differs: not causal, results differ when later arguments change:
    ...
    """
    dims = of_each("causal", "in_dims", in_dims, args)
    count = size_of("causal", "in_dims", args, dims)
    check_results("causal", fn(*args), out_dim, count, "positions")
    ends = [length if strict else length + 1 for length in _cuts(count, strict)]

    def past(result: Any, end: int) -> Any:
        return map_results(lambda y, dim: y.narrow(dim, 0, end), out_dim, result)

    def unchanged(*xs: Any) -> Any:
        result = fn(*xs)
        return [past(result, end) for end in ends]

    def unchanged_in_turn(*xs: Any) -> Any:
        return [past(fn(*xs), end) for end in ends]

    def with_other_future(*xs: Any) -> Any:
        found = []
        for end in ends:
            change = functools.partial(_after, length=end - 1 if strict else end)
            found.append(past(fn(*map_dims(change, xs, dims)), end))
        return found

    law = "not causal, results differ when later arguments change"
    return agree(law, with_other_future, unchanged, args, orders, twin=unchanged_in_turn)


@law
def padding_invariant(
    fn: Callable[..., Any],
    x: Any,
    *args: Any,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    fill: Annotated[float | None, CheckedInside] = None,
    per_position: bool = True,
    orders: Sequence[str] = ALL_ORDERS,
) -> Report:
    """Assert that padding does not change results at valid positions.

    Args:
        fn: a function of pytrees; if it takes a mask or lengths itself, they are among ``args``, by
            position. Only this law uses the keywords.
        x: a pytree of tensors with leading dims (batch, positions), which are changed where padded.
        args: further arguments of ``fn``, which are not changed.
        mask: booleans of the leading dims of ``x``, true where it is not padded.
        lengths: instead of a mask, the number of valid positions of each example.
        fill: a number to put into the padding of floating tensors, such as a large one, or
            ``float("nan")``, which a product with zero does not mask; by default random numbers of the
            tensors' size.
        per_position: whether results have leading dims (batch, positions) too, and are compared where not
            padded; otherwise they are compared entirely, as pooled results are.
        orders: the quantities to compare; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: padding changes a result or a derivative; the message is the report.
        ValueError: neither mask nor lengths, or both, are given, they pad nothing or do not fit.

    >>> import torch
    >>> from torchard.testing import padding_invariant
    >>> x, lengths = torch.tensor([[0.5, 2.0, 7.0], [1.0, 3.0, 5.0]]), torch.tensor([2, 3])
    >>> mask = torch.arange(3) < lengths[:, None]
    >>> def mean(x, mask):
    ...     return x.where(mask, 0).sum(1) / mask.sum(1)
    >>> padding_invariant(mean, x, mask, lengths=lengths, fill=float("nan"), per_position=False).good
    True
    >>> product = lambda x, mask: (x * mask).sum(1) / mask.sum(1)
    >>> padding_invariant(product, x, mask, lengths=lengths, fill=float("nan"), per_position=False)
    Traceback (most recent call last):
        ...
    torchard.Differs: padding changes results, fn differs when padded values change:
    ...
    """
    valid, unfilled = _mask(x, mask, lengths), _unfilled(fn, x, *args)
    if per_position:
        for y in tree.leaves(fn(x, *args)):
            if not isinstance(y, torch.Tensor) or y.shape[: valid.ndim] != valid.shape:
                raise ValueError(
                    f"padding_invariant: fn returned {_shape(y)}, without leading dims "
                    f"{list(valid.shape)} as the mask's; pass per_position=False if it is pooled."
                )

    def kept(result: Any) -> Any:
        """Results with zeros where padded, so that places in a report are those in the result."""
        if not per_position:
            return result
        return tree.map(lambda y: y.where(_leading(valid, y), y.new_zeros(())), result)

    def repadded(x: torch.Tensor) -> torch.Tensor:
        other = changed(x)
        if fill is not None and is_inexact(x):
            other = torch.full_like(x, fill).detach()
        return torch.where(_leading(valid, x), x, other)

    law = "padding changes results, fn differs when padded values change"
    if unfilled:
        law += f" (fn is called without its {unfilled}: pass it by position, after x)"
    return agree(
        law,
        lambda x, *rest: kept(fn(tree.map(repadded, x), *rest)),
        lambda x, *rest: kept(fn(x, *rest)),
        (x, *args),
        orders,
    )


def _unfilled(fn: Callable[..., Any], *args: Any) -> str:
    """The parameter of a mask or lengths that fn has, and is not given, if there is one.

    Raises:
        TypeError: fn needs it.
    """
    try:
        signature = inspect.signature(fn)
        given = signature.bind_partial(*args).arguments
    except (TypeError, ValueError):  # a function in C, or one that takes fewer arguments
        return ""
    missing = [
        parameter
        for name, parameter in signature.parameters.items()
        if name not in given and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    found = next((p for p in missing if "mask" in p.name or "length" in p.name), None)
    if found is None:
        return ""
    name = found.name
    if found.default is found.empty:
        raise TypeError(
            f"padding_invariant: fn needs its {name}, by position: padding_invariant(fn, x, {name}, "
            "lengths=...); the keywords mask and lengths tell only this law what is padded, and are "
            "not passed to fn."
        )
    return name


def _cuts(count: int, strict: bool) -> list[int]:
    """At which positions results are compared up to: but for strictness, all later ones are changed."""
    first, last = (1, count) if strict else (0, count - 2)
    number = min(_CUTS, last - first + 1)
    if number == 1:
        return [first]
    return sorted({first + round(i * (last - first) / (number - 1)) for i in range(number)})


def _after(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """A sequence that is changed after its first positions."""
    rest = x.shape[dim] - length
    return torch.cat([x.narrow(dim, 0, length), changed(x).narrow(dim, length, rest)], dim)


def _mask(x: Any, mask: torch.Tensor | None, lengths: torch.Tensor | None) -> torch.Tensor:
    tensors = tree.leaves(x)
    if (mask is None) == (lengths is None):
        raise ValueError("padding_invariant: give either mask or lengths.")
    if not tensors or not all(isinstance(t, torch.Tensor) for t in tensors):
        raise ValueError("padding_invariant: x has to be a pytree of tensors.")
    if lengths is not None:
        if any(t.ndim < 2 for t in tensors) or lengths.ndim != 1:
            raise ValueError(
                f"padding_invariant: lengths of shape {list(lengths.shape)} with x of "
                f"{_shape(tensors[0])}; they take shapes [batch] and [batch, positions, ...]."
            )
        places = torch.arange(tensors[0].shape[1], device=lengths.device)
        mask = places < lengths[:, None]
    assert mask is not None
    for t in tensors:
        if t.shape[: mask.ndim] != mask.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"padding_invariant: the mask is {mask.dtype} of shape {list(mask.shape)}, and x has "
                f"{_shape(t)}; it takes booleans of x's leading dims."
            )
    if bool(mask.all()) or not bool(mask.any()):
        raise ValueError(
            f"padding_invariant: {'nothing' if mask.all() else 'everything'} is padded, so there is "
            "nothing to compare; pad some positions."
        )
    return mask


def _leading(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A mask of leading dims, in a shape that broadcasts with the tensor."""
    return mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"shape {list(value.shape)}"
    return f"a {type(value).__name__}"


@law
def check_associative(
    f: Callable[..., Any], a: Any, b: Any, c: Any, dim: int = 0, *, orders: Sequence[str] = ALL_ORDERS
) -> Report:
    """Assert that a function can be the operation of an `associative_scan`.

    ``f(f(a, b), c)`` and ``f(a, f(b, c))`` must be equal up to rounding, in derivatives too; and each
    element along ``dim`` must be computed by itself, from the elements at its index.

    Args:
        f: a function of two trees that returns a third.
        a: a tree of tensors with the same size, at least 2, along ``dim``.
        b: another one.
        c: another one.
        dim: the dim of elements, which are combined independently.
        orders: the quantities to compare; see `equal`.

    Returns:
        A report with a row for each value.

    Raises:
        AssertionError: f is not associative, or mixes elements; the message is the report.
        ValueError: the trees have no common size along ``dim``.

    >>> import torch
    >>> from torchard.testing import check_associative
    >>> a, b, c = torch.tensor([[0.5, 2.0], [-1.0, 0.25], [3.0, 1.0]])
    >>> check_associative(torch.logaddexp, a, b, c).good
    True
    >>> check_associative(torch.sub, a, b, c)
    Traceback (most recent call last):
        ...
    torchard.Differs: not associative, f(f(a, b), c) and f(a, f(b, c)) differ:
    ...
    """
    args = (a, b, c)
    count = size_of("check_associative", "dim", args, [dim] * len(args))

    def left(a: Any, b: Any, c: Any) -> Any:
        return f(f(a, b), c)

    def right(a: Any, b: Any, c: Any) -> Any:
        return f(a, f(b, c))

    def of_all(a: Any, b: Any) -> Any:
        return f(a, b)

    def one_by_one(a: Any, b: Any) -> Any:
        parts = [f(*map_dims(_one(i), (a, b), [dim, dim])) for i in range(count)]
        return tree.map(lambda *ys: torch.cat(ys, dim), *parts)

    report = agree("not associative, f(f(a, b), c) and f(a, f(b, c)) differ", left, right, args, orders)
    agree(f"not element by element along dim {dim}", of_all, one_by_one, (a, b), orders)
    return report


def _one(i: int) -> Callable[..., torch.Tensor]:
    return lambda x, dim: x.narrow(dim, i, 1)
