"""Layouts: which part of a global value each mesh coordinate holds.

A dim is a product of sub-dims, and each sub-dim is split over an ordered tuple of mesh axes. Flattening
concatenates sub-dims and unflattening separates them, so a view of a sharded dim costs nothing as long
as its boundaries fall between sub-dims. Along an axis that splits no sub-dim the value is replicated, or
*pending*: each coordinate holds a contribution, and a reduction over the axis completes the value.
A value may also be at *home* at one coordinate of an axis, such as a stage of a pipeline: ranks at the
others hold nothing of it. Plans split and reduce values without regard to homes (``pipelining``).

Uneven splits follow ``torch.chunk`` (32 over 3 is 11, 11, 10; 1 over 2 is 1, 0), axis by axis, the
first axis of the tuple outermost.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchard.sharding.layouts.interned import Interned

__all__ = ["VARYING", "Axes", "Dim", "Layout", "Sub", "chunk", "merge", "refine"]

# In place of a reduction: along the axis each coordinate has a value of its own (manual mode).
VARYING = "varying"

Sizes = tuple[tuple[str, int], ...]  # the mesh's axes and their sizes: hashable
Axes = tuple[str, ...]
Coords = Mapping[str, int]


class Sub(NamedTuple):
    """A sub-dim of ``size`` elements, split over ``axes`` (outermost first)."""

    size: int
    axes: tuple[str, ...] = ()


Dim = tuple[Sub, ...]


def _largest(sub: Sub, sizes: Mapping[str, int]) -> int:
    size = sub.size
    for axis in sub.axes:
        size = -(-size // sizes[axis])
    return size


def chunk(size: int, axes: Sequence[str], coords: Coords, sizes: Mapping[str, int]) -> range:
    """The indices of a sub-dim that the coordinate owns."""
    start, stop = 0, size
    for axis in axes:
        step = -(-(stop - start) // sizes[axis])
        low = min(start + step * coords[axis], stop)
        start, stop = low, min(low + step, stop)
    return range(start, stop)


def _coordinates(axes: Iterable[str], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    axes = tuple(axes)
    for index in itertools.product(*(range(sizes[a]) for a in axes)):
        yield dict(zip(axes, index, strict=True))


@functools.lru_cache(maxsize=16384)
def _joins(outer: Sub, inner: Sub, sizes: Sizes) -> bool:
    """Whether a single sub-dim over the axes of both gives every coordinate the same elements."""
    if not inner.axes and (not outer.axes or outer.size % _parts(outer.axes, sizes) == 0):
        return True
    if outer.size == 1 and not outer.axes:
        return True
    table = dict(sizes)
    joint = outer.axes + inner.axes
    for at in _coordinates(joint, table):
        rows, columns = chunk(outer.size, outer.axes, at, table), chunk(inner.size, inner.axes, at, table)
        joined = chunk(outer.size * inner.size, joint, at, table)
        if len(rows) * len(columns) != len(joined):
            return False
        if len(joined) and len(columns) != inner.size and len(rows) != 1:
            return False
        if len(joined) and joined.start != rows.start * inner.size + columns.start:
            return False
    return True


def _parts(axes: Iterable[str], sizes: Sizes) -> int:
    """The number of parts into which these axes split a sub-dim."""
    table = dict(sizes)
    return math.prod(table[a] for a in axes)


def merge(subs: Iterable[Sub], sizes: Sizes) -> Dim:
    """The normal form of a dim, in which adjacent sub-dims are joined wherever one describes both."""
    out: list[Sub] = []
    for sub in subs:
        if sub.size == 1 and not sub.axes and out:
            continue
        while out and _joins(out[-1], sub, sizes):
            last = out.pop()
            sub = Sub(last.size * sub.size, last.axes + sub.axes)
        out.append(sub)
    return tuple(out)


def _split(sub: Sub, size: int, sizes: Sizes) -> tuple[Sub, Sub] | None:
    """``sub`` as an outer sub-dim of ``size`` and an inner one; None if that cuts through a shard."""
    if size == 0 or sub.size % size:
        return None
    for cut in range(len(sub.axes), -1, -1):
        outer, inner = Sub(size, sub.axes[:cut]), Sub(sub.size // size, sub.axes[cut:])
        if _joins(outer, inner, sizes):
            return outer, inner
    return None


@functools.lru_cache(maxsize=16384)
def refine(dim: Dim, factors: tuple[int, ...], sizes: Sizes) -> tuple[Dim, ...] | None:
    """Cut a dim at the boundaries of ``factors`` (whose product is its size).

    Returns, for each factor, its sub-dims; None where a boundary falls inside a shard.
    """
    if math.prod(factors) == 0:
        return _refine_empty(dim, factors)
    rest = list(dim)
    out: list[Dim] = []
    for factor in factors:
        taken: list[Sub] = []
        need = factor
        while need > 1 or (rest and rest[0].size == 1 and not taken):
            if not rest:
                return None
            sub = rest.pop(0)
            if sub.size > need:
                cut = _split(sub, need, sizes)
                if cut is None:
                    return None
                sub = cut[0]
                rest.insert(0, cut[1])
            if sub.size == 0 or need % sub.size:
                return None
            taken.append(sub)
            need //= sub.size
        out.append(tuple(taken) or (Sub(factor),))
    return _attach_ones(rest, out)


def _attach_ones(rest: list[Sub], out: list[Dim]) -> tuple[Dim, ...] | None:
    """Give a factor of size 1 the axes of sub-dims of size 1 that are left over; None if there is none.

    A split sub-dim of size 1 matters, since one shard alone has its element.
    """
    axes = tuple(a for sub in rest for a in sub.axes)
    if not axes:
        return tuple(out)
    for i, dim in enumerate(out):
        if dim == (Sub(1),):
            out[i] = (Sub(1, axes),)
            return tuple(out)
    return None


def _refine_empty(dim: Dim, factors: tuple[int, ...]) -> tuple[Dim, ...] | None:
    if any(sub.axes for sub in dim):
        return (dim,) if len(factors) == 1 else None
    return tuple((Sub(f),) for f in factors)


@dataclass(frozen=True, eq=False)
class Layout(metaclass=Interned):
    """The layout of a value; equal ones are one object.

    Attributes:
        dims: the sub-dims of each dim.
        pending: the axes over which the value is pending, with the reductions.
        home: axes along which one coordinate alone has the value, with that coordinate.
    """

    dims: tuple[Dim, ...]
    pending: tuple[tuple[str, str], ...] = ()
    home: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def replicated(shape: Sequence[int]) -> Layout:
        """Every coordinate holds everything."""
        return _replicated(tuple(shape))

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(s.size for s in dim) for dim in self.dims)

    @functools.cached_property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split a dim, in dim order."""
        return tuple(a for dim in self.dims for sub in dim for a in sub.axes)

    @functools.cached_property
    def axes(self) -> frozenset[str]:
        """The axes along which coordinates hold different values."""
        return frozenset(self.split_axes) | {a for a, _ in self.pending}

    @functools.cached_property
    def in_parts(self) -> bool:
        """Whether a dim is several sub-dims."""
        return any(len(dim) > 1 for dim in self.dims)

    @property
    def is_replicated(self) -> bool:
        return not self.axes

    @functools.cached_property
    def varying(self) -> frozenset[str]:
        """The axes along which each coordinate has a value of its own (manual mode)."""
        return frozenset(a for a, op in self.pending if op == VARYING)

    @functools.cached_property
    def awaited(self) -> tuple[str, ...]:
        """The axes over which a reduction is still to be done."""
        return tuple(a for a, op in self.pending if op != VARYING)

    def is_at(self, coords: Coords) -> bool:
        """Whether the ranks at a coordinate have a part of the value."""
        return all(coords[axis] == place for axis, place in self.home)

    def homed(self, home: tuple[tuple[str, int], ...]) -> Layout:
        """The layout with another home; ``()`` for everywhere."""
        return self if home == self.home else Layout(self.dims, self.pending, home)

    def dim_of(self, axis: str) -> int | None:
        """The dim that the axis splits, or None."""
        for i, dim in enumerate(self.dims):
            if any(axis in sub.axes for sub in dim):
                return i
        return None

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes that split a dim, outermost first."""
        return tuple(axis for sub in self.dims[dim] for axis in sub.axes)

    def local_subs(self, coords: Coords, sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
        """The local size of every sub-dim, 0 where the value is not."""
        here = self.is_at(coords)
        return tuple(
            tuple(len(chunk(s.size, s.axes, coords, sizes)) if here else 0 for s in dim)
            for dim in self.dims
        )

    def local_shape(self, coords: Coords, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the shard at a coordinate."""
        if not self.split_axes and self.is_at(coords):
            return self.shape
        return tuple(math.prod(dim) for dim in self.local_subs(coords, sizes))

    def local_range(self, dim: int, coords: Coords, sizes: Mapping[str, int]) -> range:
        """The global indices of a dim at a coordinate, which are contiguous if it is one sub-dim.

        Raises:
            ValueError: the dim is several sub-dims.
        """
        subs = self.dims[dim]
        if len(subs) != 1:
            raise ValueError(f"dim {dim} of {self} is not contiguous")
        return chunk(subs[0].size, subs[0].axes, coords, sizes)

    def largest_local(self, sizes: Mapping[str, int]) -> int:
        """The number of elements of the largest shard."""
        return math.prod(self.largest_shape(sizes))

    def largest_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the largest shard."""
        return tuple(math.prod(_largest(sub, sizes) for sub in dim) for dim in self.dims)

    def key(self, coords: Coords) -> tuple[int, ...]:
        """The coordinate along ``axes``, which identifies a shard among the distinct ones."""
        return tuple(coords[a] for a in sorted(self.axes))

    def keys(self, sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
        """The coordinate along ``axes`` of every distinct shard, in the order of ``key``."""
        return _coordinates(sorted(self.axes), sizes)

    def normal(self, sizes: Sizes) -> Layout:
        """The layout in normal form, in which equivalent layouts compare equal."""
        dims = tuple(merge(d, sizes) or (Sub(1),) for d in self.dims)
        return Layout(dims, self.pending, self.home)

    def along(self, axes: Container[str], sizes: Sizes) -> Layout:
        """The layout restricted to some axes, without pending sums."""
        dims = (
            merge([Sub(s.size, tuple(a for a in s.axes if a in axes)) for s in dim], sizes)
            for dim in self.dims
        )
        return Layout(tuple(dims))

    def split_further(self, axes: Axes, order: Axes) -> Layout:
        """The layout with its first dim split over further axes, all in an order; it has no sub-dims."""
        (sub, *inner), *dims = self.dims
        rows = Sub(sub.size, tuple(a for a in order if a in {*sub.axes, *axes}))
        return self if inner else Layout(((rows,), *dims))

    def reduced(self) -> Layout:
        """The layout after all reductions, which leave varying axes as they are."""
        return self._pending((a, VARYING) for a in self.varying) if self.pending else self

    def varying_over(self, axes: Iterable[str]) -> Layout:
        """The layout in which each coordinate along these axes, and no others, has its own value."""
        rest = [p for p in self.pending if p[1] != VARYING]
        return self._pending([*rest, *((a, VARYING) for a in axes)])

    def _pending(self, pending: Iterable[tuple[str, str]]) -> Layout:
        return Layout(self.dims, tuple(sorted(pending)), self.home)

    def with_leading(self, size: int) -> Layout:
        """The layout with a new unsplit leading dim."""
        return Layout(((Sub(size),), *self.dims), self.pending, self.home)

    def __str__(self) -> str:
        dims = [_dim_text(dim) for dim in self.dims]
        text = f"P({', '.join(dims)})"
        text += "".join(f"+{op}({axis})" for axis, op in self.pending)
        return text + "".join(f"@{axis}={place}" for axis, place in self.home)


@functools.lru_cache(maxsize=16384)
def _replicated(shape: tuple[int, ...]) -> Layout:
    return Layout(tuple((Sub(n),) for n in shape))


def _dim_text(dim: Dim) -> str:
    def axes(sub: Sub) -> str:
        return "·".join(sub.axes) if sub.axes else "None"

    if len(dim) == 1:
        return axes(dim[0])
    return "(" + " ".join(f"{s.size}:{axes(s)}" if s.axes else str(s.size) for s in dim) + ")"
