"""Shards by definition: slices of a global value, and the global value of shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from torchard.sharding.layouts.layout import Coords, Layout, chunk
from torchard.sharding.values.mesh import Mesh

__all__ = ["combined", "contributions", "shard_at", "whole_of"]

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def shard_at(x: torch.Tensor, layout: Layout, coords: Coords, mesh: Mesh) -> torch.Tensor:
    """The shard of a global value at a coordinate; a view if possible.

    Args:
        x: the global value.
        layout: the layout of the value.
        coords: the coordinate, a position along each axis.
        mesh: the mesh.

    Returns:
        The shard.

    >>> import torch, torchard as ta
    >>> from torchard.sharding.testing import shard_at
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> x = torch.arange(3)
    >>> layout = ta.place(x, mesh, ta.P("tp")).layout
    >>> shard_at(x, layout, {"tp": 0}, mesh), shard_at(x, layout, {"tp": 1}, mesh)
    (tensor([0, 1]), tensor([2]))
    """
    subs = [s for dim in layout.dims for s in dim]
    y = x.reshape([s.size for s in subs])
    for i, sub in enumerate(subs):
        own = chunk(sub.size, sub.axes, coords, mesh.shape)
        y = y.narrow(i, own.start, len(own))
    return y.reshape(layout.local_shape(coords, mesh.shape))


def contributions(x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """The distinct shards of a value, in the order of their coordinates.

    Over pending axes, they are random terms whose sum is the value.

    Args:
        x: the global value.
        layout: the layout of the value.
        mesh: the mesh.

    Returns:
        A list of tensors.

    >>> import torch, torchard as ta
    >>> from torchard.sharding.testing import contributions
    >>> mesh = ta.Mesh({"dp": 2, "tp": 2}, virtual=True)
    >>> x = torch.arange(4)
    >>> contributions(x, ta.place(x, mesh, ta.P("tp")).layout, mesh)          # dp holds copies
    [tensor([0, 1]), tensor([2, 3])]
    """
    axes = sorted(a for a, _ in layout.pending)
    count = math.prod(mesh.shape[a] for a in axes)
    generator = torch.Generator().manual_seed(count)
    terms = _terms(x, count, generator)
    shards = []
    for at in _distinct(layout, mesh):
        index = 0
        for a in axes:
            index = index * mesh.shape[a] + at[a]
        shards.append(shard_at(terms[index], layout, at, mesh))
    return shards


def _terms(x: torch.Tensor, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random tensors whose sum is x; for bools the sum is a logical or."""
    if count == 1:  # of any dtype: some cannot be added
        return [x]
    noise = [torch.randint(-3, 4, x.shape, generator=generator) for _ in range(count - 1)]
    if x.dtype == torch.bool:
        return [*((n > 0) & x for n in noise), x]
    return [*(n.to(x) for n in noise), x - sum(noise, torch.zeros_like(x))]


def _distinct(layout: Layout, mesh: Mesh) -> list[dict[str, int]]:
    """The first coordinate of each distinct shard."""
    first: dict[tuple[int, ...], dict[str, int]] = {}
    for at in mesh.all_coords():
        first.setdefault(layout.key(at), at)
    return list(first.values())


def whole_of(parts: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The global value of distinct shards, with pending ones reduced: the inverse of `contributions`.

    Args:
        parts: the shards, in the order of their coordinates.
        layout: the layout of the value.
        mesh: the mesh.

    Returns:
        The global value.

    >>> import torch, torchard as ta
    >>> from torchard.sharding.testing import whole_of
    >>> x = ta.place(torch.arange(3), ta.Mesh({"tp": 2}, virtual=True), ta.P("tp"))
    >>> whole_of(x.parts, x.layout, x.mesh)
    tensor([0, 1, 2])
    """
    ops = dict(layout.pending)
    filled: dict[tuple[int, ...], torch.Tensor] = {}
    for part, at in zip(parts, _distinct(layout, mesh), strict=True):
        group = tuple(at[a] for a in sorted(layout.axes) if a in ops)
        whole = filled.setdefault(group, part.new_zeros(layout.shape))
        _write(whole, part, layout, at, mesh)
    return combined(list(filled.values()), next(iter(ops.values()), "sum"))


def _write(whole: torch.Tensor, part: torch.Tensor, layout: Layout, at: Coords, mesh: Mesh) -> None:
    """Write a shard to its place in the global value."""
    subs = [s for dim in layout.dims for s in dim]
    view = whole.view([s.size for s in subs])
    own = [chunk(s.size, s.axes, at, mesh.shape) for s in subs]
    for i, run in enumerate(own):
        view = view.narrow(i, run.start, len(run))
    view.copy_(part.reshape([len(run) for run in own]))


def combined(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The elementwise reduction of tensors of one shape.

    Args:
        parts: at least one tensor.
        op: ``"sum"``, ``"max"`` or ``"min"``.

    Returns:
        A tensor of that shape.

    >>> import torch
    >>> from torchard.sharding.testing import combined
    >>> combined([torch.tensor([1, 5]), torch.tensor([3, 2])], "max")
    tensor([3, 5])
    """
    total = parts[0]
    for part in parts[1:]:
        total = _REDUCTIONS[op](total, part)
    return total
