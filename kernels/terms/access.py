"""Accesses: the strides and offset by which a tensor reads a buffer. Every view is an access.

Views, transpositions, expansions and slices compute nothing, so for matching they are not operations but
strides over the buffer of the viewed value. Two spellings of one value then differ in strides only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Access", "contiguous", "digits"]

Dim = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Access:
    """An access, by which element [i, j, ...] is at ``offset + i * stride_0 + j * stride_1 + ...``.

    Attributes:
        dims: the size and stride of each dim; the stride is 0 if the size is 1 or the dim is expanded.
        offset: the offset of the first element.
    """

    dims: tuple[Dim, ...]
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self.dims)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def distinct(self) -> int:
        """The number of distinct elements of the buffer that the access reads."""
        return math.prod(size for size, stride in self.dims if stride)

    def reshaped(self, shape: Sequence[int]) -> Access | None:
        """The access in another shape; None if the new shape requires a copy."""
        if 0 in self.shape and 0 in shape:
            return Access(tuple((size, 0) for size in shape))  # without elements, any strides fit
        groups = _groups(self.shape, shape)
        if groups is None:
            return None
        dims: list[Dim] = []
        for mine, theirs in groups:
            inside = _regrouped([self.dims[i] for i in mine], [shape[i] for i in theirs])
            if inside is None:
                return None
            dims += inside
        return Access(tuple(dims), self.offset)

    def permuted(self, order: Sequence[int]) -> Access:
        return Access(tuple(self.dims[i] for i in order), self.offset)

    def expanded(self, shape: Sequence[int]) -> Access:
        """The access expanded to a shape; -1 keeps a size."""
        ahead = len(shape) - len(self.dims)
        dims: list[Dim] = [(size, 0) for size in shape[:ahead]]
        for (size, stride), want in zip(self.dims, shape[ahead:], strict=True):
            dims.append((size, stride) if want in (-1, size) else (want, 0))
        return Access(tuple(dims), self.offset)

    def sliced(self, dim: int, start: int, stop: int, step: int = 1) -> Access:
        """The access with one dim sliced."""
        stride = self.dims[dim][1]
        kept = len(range(start, stop, step))
        moved = self.offset + (start * stride if kept else 0)
        return self._with(dim, [_dim(kept, stride * step)], moved)

    def selected(self, dim: int, index: int) -> Access:
        size, stride = self.dims[dim]
        return self._with(dim, [], self.offset + index % size * stride)

    def unsqueezed(self, dim: int) -> Access:
        return Access((*self.dims[:dim], (1, 0), *self.dims[dim:]), self.offset)

    def squeezed(self, dims: Sequence[int]) -> Access:
        """The access without the dims in ``dims`` whose size is 1."""
        kept = [d for i, d in enumerate(self.dims) if i not in dims or d[0] != 1]
        return Access(tuple(kept), self.offset)

    def _with(self, dim: int, dims: Sequence[Dim], offset: int) -> Access:
        return Access((*self.dims[:dim], *dims, *self.dims[dim + 1 :]), offset)


def _dim(size: int, stride: int) -> Dim:
    return (size, 0 if size == 1 else stride)


def contiguous(shape: Sequence[int]) -> Access:
    """The access that reads a buffer of this shape in order."""
    dims: list[Dim] = []
    stride = 1
    for size in reversed(shape):
        dims.append(_dim(size, stride))
        stride *= size
    return Access(tuple(reversed(dims)))


def _groups(mine: Sequence[int], theirs: Sequence[int]) -> list[tuple[list[int], list[int]]] | None:
    """The smallest runs of dims with equal products on both sides; dims of size 1 may join any run."""
    if math.prod(mine) != math.prod(theirs) or 0 in mine:
        return None
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(mine) or j < len(theirs):
        left, right = [i] if i < len(mine) else [], [j] if j < len(theirs) else []
        a, b = (mine[i] if left else 1), (theirs[j] if right else 1)
        i, j = i + len(left), j + len(right)
        while a != b:
            if a < b:
                a *= mine[i]
                left.append(i)
                i += 1
            else:
                b *= theirs[j]
                right.append(j)
                j += 1
        groups.append((left, right))
    return groups


def _regrouped(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim] | None:
    """A run of dims regrouped to other sizes; None if the strides do not allow it."""
    joined = _joined([d for d in dims if d[0] != 1])
    if joined is None:
        return None
    stride = joined[1]
    regrouped: list[Dim] = []
    for want in reversed(shape):
        regrouped.append(_dim(want, stride))
        stride *= want
    return regrouped[::-1]


def _joined(dims: Sequence[Dim]) -> Dim | None:
    """Adjacent dims as one dim; None if the strides do not allow it."""
    if not dims:
        return (1, 0)
    size, stride = dims[-1]
    for outer, step in reversed(dims[:-1]):
        if step != stride * size:
            return None
        size *= outer
    return size, stride


def digits(offset: int, sizes: Sequence[int]) -> list[int]:
    """The index of the element at an offset of a contiguous buffer of these sizes."""
    if 0 in sizes:
        return [0] * len(sizes)
    index = []
    for size in reversed(sizes):
        offset, digit = divmod(offset, size)
        index.append(digit)
    return index[::-1]
