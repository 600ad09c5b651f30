"""Which indices of a dim each rank holds.

An index of a dim is a number whose digits have the sizes of the dim's sub-dims, the first digit
outermost. A rank holds those indices each digit of which is in a range. A sub-dim that several mesh axes
split is split into ``ceil(n / ranks)`` by the first axis, what is left to each of its ranks by the
second, and so on.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchard.sharding.layouts.layout import Dim, Layout, Sizes

__all__ = ["Digit", "Held", "Spread", "digits_of", "joined", "parted", "spread", "spreads"]

Range = tuple[int, int]
Piece = tuple[int, int, int]  # of a digit: its size, and the range that a rank holds of it
Held = tuple[Piece, ...]


@dataclass(frozen=True)
class Digit:
    """A digit, and the range that each rank holds of it: in order of the ranks' places along the axes."""

    size: int
    axes: tuple[str, ...]
    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Spread:
    """Which indices each rank holds, by its place along those axes on which that depends, in their order.

    Equal spreads hold the same indices everywhere.
    """

    size: int
    axes: tuple[str, ...]
    held: tuple[Held, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many indices each rank holds."""
        return tuple(math.prod(stop - start for _, start, stop in held) for held in self.held)

    @property
    def in_runs(self) -> bool:
        """Whether each rank holds one run of indices."""
        return all(len(held) <= 1 for held in self.held)


def digits_of(dim: Dim, sizes: Sizes) -> tuple[Digit, ...]:
    """The digits of a dim of a layout."""
    digits = []
    for sub in dim:
        digit = Digit(sub.size, (), ((0, sub.size),))
        digits.append(parted(digit, sub.axes, sizes))
    return tuple(digits)


def parted(digit: Digit, axes: Sequence[str], sizes: Sizes) -> Digit:
    """The digit when each rank keeps its part, by its place along some more axes, of what it holds."""
    table = dict(sizes)
    for axis in axes:
        count, ranges = table[axis], list[Range]()
        for start, stop in digit.ranges:
            step = -(-(stop - start) // count)
            ends = [min(start + step * i, stop) for i in range(count + 1)]
            ranges.extend(itertools.pairwise(ends))
        digit = Digit(digit.size, (*digit.axes, axis), tuple(ranges))
    return digit


def joined(digit: Digit, axes: tuple[str, ...], sizes: Sizes) -> Digit | None:
    """The digit when ranks along some axes, the first outermost, put what they hold one after another.

    None: there is a gap or an overlap between two of them.
    """
    rest = tuple(a for a in digit.axes if a not in axes)
    known = dict(zip(_places(digit.axes, sizes), digit.ranges, strict=True))
    ranges = []
    for outer in _places(rest, sizes):
        at = dict(zip(rest, outer, strict=True))
        group = []
        for inner in _places(axes, sizes):
            at |= dict(zip(axes, inner, strict=True))
            group.append(known[tuple(at[a] for a in digit.axes)])
        if any(before[1] != after[0] for before, after in itertools.pairwise(group)):
            return None
        ranges.append((group[0][0], group[-1][1]))
    return Digit(digit.size, rest, tuple(ranges))


def spreads(layout: Layout, sizes: Sizes) -> tuple[Spread, ...]:
    """The indices of each dim that each rank holds."""
    return tuple(_whole_dim(digits_of(dim, sizes), sizes) for dim in layout.dims)


def _whole_dim(digits: tuple[Digit, ...], sizes: Sizes) -> Spread:
    found = spread(digits, (math.prod(d.size for d in digits),), sizes)
    assert found is not None
    return found[0]


@functools.lru_cache(maxsize=65536)
def spread(
    digits: tuple[Digit, ...], factors: tuple[int, ...], sizes: Sizes
) -> tuple[Spread, ...] | None:
    """The indices of each factor of a dim that each rank holds; the factors' sizes multiply to the dim's.

    None if a rank holds indices that are not all combinations of some indices of each factor.
    """
    axes = tuple(sorted({a for digit in digits for a in digit.axes}))
    if 0 in factors:
        return _of_nothing(factors, axes)
    known = [dict(zip(_places(d.axes, sizes), d.ranges, strict=True)) for d in digits]
    tables: list[dict[tuple[int, ...], Held]] = [{} for _ in factors]
    for place in _places(axes, sizes):
        at = dict(zip(axes, place, strict=True))
        pieces = [
            (digit.size, *ranges[tuple(at[a] for a in digit.axes)])
            for digit, ranges in zip(digits, known, strict=True)
        ]
        cut = _cut(pieces, factors)
        if cut is None:
            return None
        for table, held in zip(tables, cut, strict=True):
            table[place] = held
    return tuple(_dependent(n, axes, t) for n, t in zip(factors, tables, strict=True))


def _of_nothing(factors: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Spread, ...]:
    """A dim without indices: nobody holds any, and its first factor of size 0 counts as split."""
    empty = factors.index(0)
    whole = (Spread(n, (), (((n, 0, n),),)) for n in factors)
    return tuple(Spread(0, axes, ()) if i == empty else spread for i, spread in enumerate(whole))


def _places(axes: Iterable[str], sizes: Sizes) -> Iterable[tuple[int, ...]]:
    table = dict(sizes)
    return itertools.product(*(range(table[a]) for a in axes))


def _dependent(size: int, axes: tuple[str, ...], table: dict[tuple[int, ...], Held]) -> Spread:
    """The spread over only those axes on which it depends."""
    for axis in axes:
        i = axes.index(axis)
        without = {(*place[:i], *place[i + 1 :]): held for place, held in table.items()}
        if all(without[(*place[:i], *place[i + 1 :])] == held for place, held in table.items()):
            axes, table = (*axes[:i], *axes[i + 1 :]), without
    return Spread(size, axes, tuple(table[place] for place in sorted(table)))


def _cut(pieces: Sequence[Piece], factors: Sequence[int]) -> list[Held] | None:
    """What is held of each factor; None if it is no combination of such."""
    rest, found = list(reversed(pieces)), list[list[Piece]]()
    for factor in factors:
        need, taken = factor, list[Piece]()
        while rest and (need > 1 or (factor == 1 and rest[-1][0] == 1 and not taken)):
            piece = rest.pop()
            if piece[0] > need:
                halves = _halves(piece, need)
                if halves is None:
                    return None
                piece = halves[0]
                rest.append(halves[1])
            if need % piece[0]:
                return None
            taken.append(piece)
            need //= piece[0]
        found.append(taken)
    if rest:  # digits of one value: some ranks may hold it and others nothing
        found[max((i for i, n in enumerate(factors) if n == 1), default=-1)] += rest
    return [_normal(taken, n) for taken, n in zip(found, factors, strict=True)]


def _halves(piece: Piece, outer: int) -> tuple[Piece, Piece] | None:
    """A digit as two, of which the first has this size; None if the range is no pair of ranges."""
    size, start, stop = piece
    if size % outer:
        return None
    inner = size // outer
    if start == stop:
        return (outer, 0, 0), (inner, 0, inner)
    if start % inner == 0 and stop % inner == 0:
        return (outer, start // inner, stop // inner), (inner, 0, inner)
    at = start // inner
    if (stop - 1) // inner == at:
        return (outer, at, at + 1), (inner, start - at * inner, stop - at * inner)
    return None


def _normal(pieces: Sequence[Piece], size: int) -> Held:
    """The same indices in the fewest digits; digits of one value are left out."""
    if any(start == stop for _, start, stop in pieces):
        return ((size, 0, 0),)
    found: list[Piece] = []
    for n, start, stop in pieces:
        if n == 1:
            continue
        outer = found[-1] if found else None
        if outer and (start, stop) == (0, n):
            found[-1] = (outer[0] * n, outer[1] * n, outer[2] * n)
        elif outer and outer[2] - outer[1] == 1:
            found[-1] = (outer[0] * n, outer[1] * n + start, outer[1] * n + stop)
        else:
            found.append((n, start, stop))
    return tuple(found)
