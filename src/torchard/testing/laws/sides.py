"""The comparison of a law's two sides, and changes of the arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.tensor_spec import is_inexact
from torchard.testing.equal import Reference
from torchard.testing.report import Differs, Report

__all__ = [
    *("Dims", "agree", "along", "changed", "check_floats", "check_results", "map_dims"),
    *("map_results", "of_each", "size_of"),
]

Fn = Callable[..., Any]
Dims = int | None | Sequence[Any]


def agree(
    law: str,
    left: Fn,
    right: Fn,
    args: Sequence[Any],
    orders: Sequence[str],
    *,
    ties: bool = False,
    twin: Fn | None = None,
) -> Report:
    """Assert that both sides of a law agree; roundings of both count, as the user wrote both.

    Args:
        law: the statement of the law, for the message.
        left: one side.
        right: the other side.
        args: the arguments of both sides.
        orders: the quantities to compare; see `equal`.
        ties: whether the sides may choose different elements among equal elements of the arguments. If
            derivatives differ, they are compared again at arguments whose elements all differ.
        twin: the right side, computed in as many operations as the left side; see `Reference`.

    Raises:
        AssertionError: the sides differ; the message names the law.
    """
    if not (_floats(args) and _floats(right(*args))):
        orders = [order for order in orders if order == "value"]
    try:
        return Reference(right, args, orders, both=True, twin=twin).check(left, *args)
    except Differs as error:
        error.heading = f"{law}:"
        if ties and _only_derivatives(error.report) and any(map(_has_ties, tree.leaves(args))):
            with contextlib.suppress(Differs):
                return agree(law, left, right, tree.map(_untied, args), orders)
        raise


def _only_derivatives(report: Report) -> bool:
    """Whether values agree and only derivatives differ."""
    return not any(row.problem for row in report) and all(
        row.good or "gradient of " in row.path or "tangent of " in row.path for row in report
    )


def _has_ties(x: Any) -> bool:
    return is_inexact(x) and torch.unique(x.detach().abs()).numel() < x.numel()


def _untied(x: Any) -> Any:
    """A nearby tensor with the same signs, whose elements all differ; zeros become small numbers."""
    if not is_inexact(x):
        return x
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(x.numel(), generator=generator).reshape(x.shape).to(x.device)
    # Steps of a few units in the last place, which separate equal elements in any dtype.
    unit = max(2.0**-10 / max(1, x.numel()), 4 * torch.finfo(x.dtype).eps)
    size = torch.where(x == 0, x.abs().mean() + unit, x.detach())
    return x.detach() + size * (unit * (1 + order)).to(x.dtype)


def _floats(value: Any) -> bool:
    return any(map(is_inexact, tree.leaves(tree.whole(value))))


def check_floats(who: str, args: Sequence[Any]) -> None:
    """Check that there is a floating tensor to vary.

    Raises:
        ValueError: no argument has one.
    """
    if not _floats(args):
        raise ValueError(f"{who}: no argument has a floating tensor; pass values such as torch.ones(3).")


def of_each(who: str, name: str, dims: Dims, values: Sequence[Any]) -> list[Any]:
    """The dims of each argument, given as a list or as one dim for all arguments.

    Raises:
        ValueError: the list does not have one entry for each argument.
    """
    if dims is None or isinstance(dims, int):
        return [dims] * len(values)
    if len(dims) != len(values):
        raise ValueError(
            f"{who}: {name} is {dims!r}, for {len(values)} arguments; give a number for all, or a list "
            "with a number for each, None where it has no such dim."
        )
    return list(dims)


def size_of(who: str, name: str, args: Sequence[Any], dims: Sequence[Any]) -> int:
    """The common size of the arguments along their dims, which must be at least 2.

    Raises:
        ValueError: an argument lacks the dim, or sizes differ or are less than 2.
    """
    sizes: dict[str, int] = {}
    for i, (arg, dim) in enumerate(zip(args, dims, strict=True)):
        for path, x in zip(tree.paths(arg, f"args[{i}]"), tree.leaves(arg), strict=True):
            for d in _listed(dim) if isinstance(x, torch.Tensor) else ():
                if not -x.ndim <= d < x.ndim:
                    raise ValueError(
                        f"{who}: {path} has shape {list(x.shape)}, and no dim {d} as {name} says; "
                        f"give {name} as a list, with None for arguments without it."
                    )
                sizes[f"dim {d} of {path}"] = x.shape[d]
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 2:
        found = ", ".join(f"{size} ({where})" for where, size in sizes.items()) or "none"
        raise ValueError(
            f"{who}: the dims in {name} must all have the same size, at least 2; the sizes are {found}."
        )
    return next(iter(sizes.values()))


def map_dims(
    fn: Callable[[torch.Tensor, int], torch.Tensor], values: Sequence[Any], dims: Sequence[Any]
) -> tuple[Any, ...]:
    """Each tensor of the values changed along each of its dims."""

    def mapped(x: Any, dim: Any) -> Any:
        for d in _listed(dim) if isinstance(x, torch.Tensor) else ():
            x = fn(x, d)
        return x

    return tuple(
        tree.map(lambda x, d=dim: mapped(x, d), value) for value, dim in zip(values, dims, strict=True)
    )


def check_results(who: str, result: Any, dims: Dims, count: int, what: str) -> None:
    """Check that tensors of a result have a given size along their dims.

    Args:
        who: the name of the law.
        result: the result of the function under test.
        dims: one dim for all tensors, or one for each item of a tuple; None for items to skip.
        count: the required size.
        what: the name of the counted things, such as examples.

    Raises:
        ValueError: a tensor has another size along its dim, or dims fit no result.
    """
    parts: list[tuple[str, Any, Any]] = [("out", result, dims)]
    if dims is not None and not isinstance(dims, int):
        several = isinstance(result, tuple | list)
        if not several or len(result) != len(dims):
            found = f"{len(result)} results" if several else "one result"
            raise ValueError(f"{who}: out_dim is {dims!r}, a dim for each, and fn returns {found}.")
        parts = [(f"out[{i}]", result[i], dim) for i, dim in enumerate(dims)]
    if all(dim is None for _, _, dim in parts):
        raise ValueError(f"{who}: out_dim is {dims!r}, which leaves out all results.")
    for root, part, dim in parts:
        for path, y in zip(tree.paths(part, root), tree.leaves(part), strict=True):
            if dim is None or (isinstance(y, torch.Tensor) and _size(y, dim) == count):
                continue
            found = f"shape {list(y.shape)}" if isinstance(y, torch.Tensor) else repr(y)
            raise ValueError(
                f"{who}: {path} is of {found}, without {count} {what} along dim {dim}; out_dim is the "
                "dim of results that has them: a number for all results or, if fn returns a tuple, a "
                "list with one entry for each; None skips a result, such as final states."
            )


def map_results(fn: Callable[..., Any], dims: Any, *results: Any) -> Any:
    """Apply a function to corresponding tensors of results and their dim; skip items without a dim."""
    if isinstance(dims, int):
        return tree.map(lambda *ys: fn(*ys, dims), *results)
    return tuple(
        () if dim is None else tree.map(lambda *ys, d=dim: fn(*ys, d), *parts)
        for dim, *parts in zip(dims, *results, strict=True)
    )


def along(rows: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows for the positions along a dim, in a shape that broadcasts with the tensor."""
    shape = [1] * x.ndim
    shape[dim] = -1
    return rows.to(x.device).reshape(shape)


def changed(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A tensor of different but similar values, constant in derivatives.

    Floating numbers change their size, and half of them their sign if numbers of both signs occur, so
    that values stay in domains such as the logarithm's. Zeros become numbers of the mean size. Booleans
    are negated. Each integer becomes the next value that occurs, so integers remain valid indices.
    """
    x = x.detach()
    if is_inexact(x):
        generator = torch.Generator().manual_seed(seed)
        factors = torch.rand(x.shape, generator=generator, dtype=torch.float64) + 0.25
        factors = factors + (factors > 0.75) * 0.5
        if not x.is_complex() and bool((x < 0).any()) and bool((x > 0).any()):
            signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
            factors = factors * signs
        ones = x.abs()[x != 0].mean() if bool((x != 0).any()) else x.new_ones(())
        return torch.where(x == 0, ones.to(x.dtype), x) * factors.to(x.device, x.dtype)
    if x.dtype == torch.bool:
        return ~x
    found, place = torch.unique(x, return_inverse=True)
    following: torch.Tensor = found[(place + 1) % max(1, found.numel())]
    return following


def _size(x: torch.Tensor, dim: int) -> int | None:
    return x.shape[dim] if -x.ndim <= dim < x.ndim else None


def _listed(dim: Any) -> list[int]:
    return [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
