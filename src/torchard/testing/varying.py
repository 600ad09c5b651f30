"""Values of single ranks, and the global values whose shards they may be."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.sharding.layouts.layout import VARYING
from torchard.sharding.values.placement import MeshPlacement

__all__ = ["Varying", "varies"]

# How values along an axis form a global value: all the same, terms of a sum, or (>= 0) shards of a
# dim.
_SAME, _SUM = -2, -1


def varies(tag: Any) -> tuple[str, ...]:
    """The mesh axes along which each coordinate has a different value."""
    pending = tag.pending if isinstance(tag, MeshPlacement) else ()
    return tuple(axis for axis, op in pending if op == VARYING)


@dataclass(frozen=True)
class Varying:
    """The values of one operation on all ranks, inside of `shard_map`.

    Their global value is not known, so each way of combining them is tried.

    Attributes:
        sizes: of the axes along which the values vary.
        values: one for each coordinate, the last axis fastest; all of one shape.
    """

    sizes: tuple[int, ...]
    values: tuple[torch.Tensor, ...]

    @staticmethod
    def of(tag: MeshPlacement, parts: Sequence[torch.Tensor]) -> Varying:
        """The values with this placement; along axes that split them they are gathered."""
        axes = varies(tag)
        rest = replace(tag, pending=tuple(p for p in tag.pending if p[1] != VARYING))
        sizes = tuple(tag.mesh.shape[axis] for axis in axes)
        by_place = {_key(at, tag): part for at, part in zip(tag.places, parts, strict=True)}
        values = []
        for index in itertools.product(*map(range, sizes)):
            here = dict(zip(axes, index, strict=True))
            mine = [by_place[_key({**at, **here}, tag)] for at in rest.places]
            values.append(tree.whole(rest.wrap(mine)).detach())
        return Varying(sizes, tuple(values))

    def wholes(self, shapes: Iterable[torch.Size]) -> Iterator[torch.Tensor]:
        """Every global value of one of these shapes whose shards the values may be."""
        wanted = set(shapes)
        local = self.values[0].shape
        ways = itertools.product(range(_SAME, len(local)), repeat=len(self.sizes))
        for way in ways:
            if _shape(local, way, self.sizes) in wanted:
                whole = _joined(self.values, way, self.sizes)
                if whole is not None:
                    yield whole


def _key(at: Mapping[str, int], tag: MeshPlacement) -> tuple[int, ...]:
    return tuple(at[axis] for axis in tag.axes)


def _shape(local: torch.Size, way: Sequence[int], sizes: Sequence[int]) -> torch.Size:
    shape = list(local)
    for dim, size in zip(way, sizes, strict=True):
        if dim >= 0:
            shape[dim] *= size
    return torch.Size(shape)


def _joined(
    values: Sequence[torch.Tensor], way: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor | None:
    """The values put together in this way; None where those that should be the same differ."""
    if not sizes:
        return values[0]
    width = len(values) // sizes[0]
    groups = [values[i : i + width] for i in range(0, len(values), width)]
    parts = [_joined(group, way[1:], sizes[1:]) for group in groups]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    if way[0] == _SAME:
        same = all(torch.equal(found[0], part) for part in found)
        return found[0] if same else None
    if way[0] == _SUM:
        whole = functools.reduce(torch.add, found)
        return whole if whole.dtype == found[0].dtype and whole.dtype != torch.bool else None
    return torch.cat(found, way[0])
