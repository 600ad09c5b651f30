"""Placed values under torch.func, which flattens them into shards and replaces these by other tensors.

`torch.vmap` removes a dim of each shard and adds it to each shard of the results; `jacrev` and `jacfwd`
put the dims of an argument after those of a result. So a placed value that torch.func builds is described
by what became of the shards that it was built from: ``Flattened`` keeps them, weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.placed import is_placed
from torchard.sharding.layouts.layout import Dim, Sub
from torchard.sharding.values.mesh import PlacementError
from torchard.sharding.values.placement import METHODS, MeshPlacement

__all__ = ["Flattened", "ShardReading", "rebuilt"]


class ShardReading:
    """How the dims of a value's shards are read.

    Attributes:
        base: the placement that the value had when it was first flattened.
        now: the placement of the shards as they are; None if they cannot be read.
        by_vmap: whether vmap added the dims in which they differ.
    """

    __slots__ = ("base", "by_vmap", "now")

    def __init__(
        self, base: MeshPlacement, now: MeshPlacement | None, by_vmap: bool = False
    ) -> None:
        self.base, self.now, self.by_vmap = base, now, by_vmap


class Flattened:
    """The static part of a placed value as a pytree node. Two are equal if their placements are."""

    __slots__ = ("reading", "shards")

    def __init__(self, reading: ShardReading, shards: Sequence[Any]) -> None:
        self.reading = reading
        self.shards = [weakref.ref(x) for x in shards if isinstance(x, torch.Tensor)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flattened) and self.reading.base == other.reading.base

    def __hash__(self) -> int:
        return hash(self.reading.base)

    def __repr__(self) -> str:
        return repr(self.reading.base)

    def __reduce__(self) -> Any:
        return Flattened, (self.reading, ())

    def before(self, count: int) -> list[torch.Tensor]:
        """The shards of the flattened values; an empty list unless all of them are alive."""
        alive = [x for ref in self.shards if (x := ref()) is not None]
        return alive if len(alive) == count else []


def rebuilt(flattened: Flattened, parts: Sequence[Any]) -> tuple[ShardReading, Sequence[Any]]:
    """The reading of a placed value with these parts, and its shards.

    Raises:
        PlacementError: vmap maps over a dim that is split.
    """
    reading = flattened.reading
    if parts and all(map(is_placed, parts)):
        return _jacobian(reading.base, parts)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return reading, parts
    shapes = [tuple(part.shape) for part in parts]
    before = flattened.before(len(parts))
    entered = _entered_dim(before, parts)
    if entered is not None:
        return _entered(reading, entered, shapes), parts
    added = _added_dim(before, parts)
    if added is not None and reading.now is not None:
        dims = [*reading.now.dims]
        dims.insert(added, (Sub(shapes[0][added]),))
        return ShardReading(reading.base, replace(reading.now, dims=tuple(dims)), True), parts
    if before and shapes == [tuple(x.shape) for x in before] and not _turned(before, parts):
        return reading, parts
    return _by_shapes(reading, shapes), parts


# -- vmap -----------------------------------------------------------------------------------------


def _entered_dim(before: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> int | None:
    """The dim over which vmap has just begun to map these shards; None if it has not."""
    dims = set()
    for old, part in zip(before, parts, strict=False):
        mapped = internals.mapped_over(part)
        if mapped is None or mapped[0] is not old:
            return None
        dims.add(mapped[1])
    return dims.pop() if len(dims) == 1 else None


def _entered(reading: ShardReading, dim: int, shapes: list[tuple[int, ...]]) -> ShardReading:
    held = reading.now
    if held is None:
        return ShardReading(reading.base, reading.base if _fits(reading.base, shapes) else None)
    if any(sub.axes for sub in held.dims[dim]):
        raise PlacementError(
            f"vmap cannot map over a MeshTensor along dim {dim}, which is split ({held.spec} on "
            f"{held.mesh}): each rank would map over its own shard. Write shard(vmap(f)), which maps "
            "over the global value, or map over a dim that is not split."
        )
    inner = replace(held, dims=(*held.dims[:dim], *held.dims[dim + 1 :]))
    given = not reading.by_vmap and len(held.dims) > len(reading.base.dims)
    if given and inner.axes and not inner.mesh.virtual:
        raise PlacementError(
            f"a Jacobian of, or with respect to, a MeshTensor that is split ({inner.spec} on "
            f"{inner.mesh}): torch.func would vary the shards of all ranks at once. Write "
            "shard(jacrev(f)) or shard(jacfwd(f)), which take the Jacobian of the global function."
        )
    return ShardReading(inner, inner)


def _added_dim(before: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> int | None:
    """Where vmap, which is ending, has put its dim into these shards; None if it is not ending."""
    if not before or not internals.ending_vmap(parts):
        return None
    places = range(parts[0].ndim)
    return next((d for d in places if all(map(_has_at, before, parts, [d] * len(parts)))), None)


def _has_at(old: torch.Tensor, new: torch.Tensor, dim: int) -> bool:
    mapped = internals.mapped_over(old)
    if mapped is not None:
        expected = mapped[0].movedim(mapped[1], dim)
    elif new.ndim == old.ndim + 1:  # a shard that did not depend on what was mapped
        expected = old.unsqueeze(dim).expand(new.shape) if _is_with(old, new, dim) else old
    else:
        return False
    return expected.shape == new.shape and expected.stride() == new.stride()


def _is_with(old: torch.Tensor, new: torch.Tensor, dim: int) -> bool:
    return (*new.shape[:dim], *new.shape[dim + 1 :]) == tuple(old.shape)


# -- Jacobians ------------------------------------------------------------------------------------


def _turned(before: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> bool:
    """Whether jacfwd has moved the dim of its basis, in shards of the shape that they had before."""
    return all(
        old.ndim > 1 and new.stride() == old.movedim(0, -1).stride() != old.stride()
        for old, new in zip(before, parts, strict=True)
    )


def _by_shapes(reading: ShardReading, shapes: list[tuple[int, ...]]) -> ShardReading:
    """The dims of the placement, and unsplit ones: behind them in a Jacobian, or before them."""
    base = reading.base
    rank = len(base.dims)
    if _fits(base, shapes):
        return ShardReading(base, base)
    last = _fits(base, [shape[:rank] for shape in shapes])
    first = _fits(base, [shape[len(shape) - rank :] for shape in shapes]) and not reading.by_vmap
    alike = len({shape[rank:] for shape in shapes}) == 1
    if last and alike and not (first and base.axes):
        return ShardReading(base, replace(base, dims=(*base.dims, *_unsplit(shapes[0][rank:]))))
    leads = {shape[: len(shape) - rank] for shape in shapes}
    if first and not last and len(leads) == 1:
        return ShardReading(base, replace(base, dims=(*_unsplit(leads.pop()), *base.dims)))
    return ShardReading(base, None)


def _fits(held: MeshPlacement, shapes: Sequence[tuple[int, ...]]) -> bool:
    return list(held.shapes) == list(shapes)


def _unsplit(sizes: Sequence[int]) -> tuple[Dim, ...]:
    return tuple((Sub(size),) for size in sizes)


def _jacobian(base: MeshPlacement, rows: Sequence[Any]) -> tuple[ShardReading, Sequence[Any]]:
    """The Jacobian of a placed result with respect to a placed argument: for each of its shards, one.

    It is split as the result is or, if that is not split, as the argument.
    """
    blocks = [_of_row(row, shape) for row, shape in zip(rows, base.shapes, strict=True)]
    if not base.axes:
        (block,) = blocks
        return block._reading, block.parts
    full = [METHODS.full(block) for block in blocks]
    rest = full[0].shape[len(base.dims) :]
    return ShardReading(base, replace(base, dims=(*base.dims, *_unsplit(rest)))), full


def _of_row(row: Any, shape: tuple[int, ...]) -> Any:
    inner = row._reading.base
    held = replace(inner, dims=(*_unsplit(shape), *inner.dims))
    return METHODS.wrap(held, row.parts)
