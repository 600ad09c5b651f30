"""Checks of the axes, dims and operands of the collectives of `shard_map`.

``collective`` is the name of the function that the user called, for messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torchard.sharding.manual.manual_collectives import Move, Sum
from torchard.sharding.manual.varying_axes import (
    apply,
    current,
    made_by_backward,
    native,
    varying_axes,
)
from torchard.sharding.values.mesh import MeshError

__all__ = [
    "AxisNames",
    "check_divides",
    "check_one_per_rank",
    "checked_dim",
    "ranks_along",
    "reduced",
    "region_axes",
    "summable",
]

AxisNames = str | tuple[str, ...]
Axes = tuple[str, ...]


def region_axes(collective: str, axes: AxisNames) -> tuple[Axes, Axes]:
    """The manual axes of the region, and the given axes, which must be among them."""
    region = current(collective)
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if automatic := [a for a in names if a in region.automatic]:
        raise MeshError(_is_automatic(collective, axes, automatic[0], region.manual))
    if not names or len(set(names)) != len(names) or not set(names) <= set(region.manual):
        raise MeshError(
            f"{collective} over {axes!r}: name one or several different axes of {region.mesh}: "
            f"{', '.join(region.manual)}."
        )
    return region.manual, names


def _is_automatic(collective: str, axes: AxisNames, automatic: str, manual: Axes) -> str:
    return (
        f"{collective} over {axes!r}: {automatic!r} is automatic inside this shard_map, whose "
        f"axis_names are {', '.join(map(repr, manual))}. Along it values are global, however they "
        f"are split: x.sum(0) sums over the entire batch. Drop {automatic!r} here, or add it to "
        "axis_names."
    )


def ranks_along(collective: str, names: Sequence[str]) -> int:
    """The number of ranks along these axes."""
    mesh = current(collective).mesh
    return math.prod(mesh.shape[a] for a in names)


def checked_dim(collective: str, x: torch.Tensor, dim: int, parameter: str = "dim") -> int:
    """The dim, counted from the first; it must exist."""
    if not -x.ndim <= dim < x.ndim:
        raise MeshError(
            f"{collective}: {parameter} {dim} is out of range for a value of shape {list(x.shape)}."
        )
    return dim % x.ndim


def check_divides(collective: str, x: torch.Tensor, dim: int, ranks: int) -> None:
    """Raise MeshError if a dim does not divide into equal parts, one for each rank."""
    if x.shape[dim] % ranks:
        raise MeshError(
            f"{collective}: dim {dim} of shape {list(x.shape)} cannot be divided into {ranks} "
            "equal shards, one for each rank; pad it."
        )


def check_one_per_rank(collective: str, x: torch.Tensor, dim: int, ranks: int) -> None:
    """Raise MeshError if a dim does not have one entry for each rank."""
    if x.shape[dim] != ranks:
        raise MeshError(
            f"{collective}: without tiled=True dim {dim} must have one entry for each of the {ranks} "
            f"ranks, but the shape is {list(x.shape)}."
        )


def reduced(collective: str, x: torch.Tensor, move: Move) -> torch.Tensor:
    """Apply a reduction, whose operand must vary: JAX's check, which detects redundant sums."""
    constant = move.over - varying_axes(native(x))
    if constant:
        names = " and ".join(map(repr, sorted(constant)))
        if isinstance(move, Sum) and made_by_backward(native(x)):
            raise MeshError(_summed_already(collective, names, tuple(sorted(constant))))
        remedy = (
            "if a sum of equal values is meant, multiply by axis_size(...), or call pvary(x, ...) first"
            if isinstance(move, Sum)
            else "drop the axis"
        )
        raise MeshError(
            f"{collective}: the value is invariant over {names}: every rank already holds the "
            f"same value, so it needs no {collective}; {remedy}."
        )
    return apply(move, summable(x) if isinstance(move, Sum) else x)


def _summed_already(collective: str, names: str, axes: Axes) -> str:
    over = repr(axes[0]) if len(axes) == 1 else repr(axes)
    mean = f" The mean over ranks is gradient / axis_size({over})." if collective == "pmean" else ""
    return (
        f"{collective}: the value is a gradient that is invariant over {names}. It is the "
        "gradient of a value that is the same on every rank, so the ranks' contributions are "
        "already summed over them (the transpose of the implicit broadcast). Drop the "
        f"{collective}.{mean} For each rank's own gradient, make the value varying first: "
        f"pvary(x, {over})."
    )


def summable(x: torch.Tensor) -> torch.Tensor:
    """The operand of a sum: bools are counted, as in torch.sum."""
    return x.long() if x.dtype == torch.bool else x
