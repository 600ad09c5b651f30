"""The best option of an operation, as a function of what it reads and of how its results are read.

As a function it is cached: operations recur in equal layers, in sweeps, and in copies of a program in
which others are decomposed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torchard.sharding.layouts.factors import Rule
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import Option
from torchard.sharding.layouts.reshard import cost
from torchard.sharding.planning.aliases import pulled
from torchard.sharding.planning.decision import DERIVED

__all__ = ["Chosen", "Ranks", "ReadValue", "ResultBytes", "best", "moved_base", "sent"]

Ranks = tuple[tuple[str, int], ...]  # the rank of the origin of each shard of a value, by axis


class ReadValue(NamedTuple):
    """A value as an operation finds it.

    Attributes:
        versions: the layouts in which it is available, its home first.
        size: bytes of an element, in all iterations.
        view, base: the rule of a view, and the value that it is a view of.
    """

    versions: tuple[Layout, ...]
    ranks: Ranks
    size: int
    view: Rule | None = None
    base: ReadValue | None = None

    @property
    def home(self) -> Layout:
        return self.versions[0]

    def rank(self, axis: str) -> int:
        return next((rank for a, rank in self.ranks if a == axis), DERIVED)


class ResultBytes(NamedTuple):
    """What an operation returns and sends.

    Attributes:
        sizes: bytes of an element of each result, in all iterations.
        exchanged: bytes of an element that the operation itself sends.
        rounded: whether bytes are compared as integers.
    """

    sizes: tuple[int, ...]
    exchanged: int
    rounded: bool


class Chosen(NamedTuple):
    """An option, and the rank of each shard of its results: the best rank among those it comes from."""

    option: Option
    ranks: dict[str, int]


@functools.lru_cache(maxsize=16384)
def best(
    candidates: tuple[Option, ...],
    reads: tuple[ReadValue, ...],
    wanted: tuple[Layout, ...],
    wish: Layout | None,
    results: ResultBytes,
    sizes: Sizes,
) -> Chosen:
    """The best of several options; see ``sweep.py`` for how they are compared.

    Args:
        wanted: the layouts that consumers of the first result prefer.
        wish: the layout that a constraint downstream prefers.
    """
    option = candidates[0]
    if len(candidates) > 1:
        option = _Comparison(reads, wanted, wish, results, sizes).best(candidates)
    return Chosen(option, _ranks_of(reads, option))


def sent(read: ReadValue, want: Layout, sizes: Sizes) -> float:
    """The bytes to reshard a value to a layout from its cheapest available version."""
    if want in read.versions:
        return 0.0
    layout = moved_base(read, want, sizes)
    if layout is not None and read.base is not None:
        return sent(read.base, layout, sizes)
    usable = (have for have in read.versions if set(want.pending) <= set(have.pending))
    return min(cost(have, want, sizes) for have in usable) * read.size


def moved_base(read: ReadValue, want: Layout, sizes: Sizes) -> Layout | None:
    """The layout to which a view's base can be resharded instead, for all its aliases."""
    if read.view is None or read.base is None:
        return None
    layout = pulled(read.view, want, sizes)
    return None if layout is None or set(layout.pending) - set(read.base.home.pending) else layout


def _ranks_of(reads: Sequence[ReadValue], option: Option) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for axis in dict.fromkeys(a for out in option.outs for a in out.split_axes):
        ranks[axis] = min(
            (
                read.rank(axis)
                for read, layout in zip(reads, option.ins, strict=True)
                if axis in read.home.split_axes and read.home.dim_of(axis) == layout.dim_of(axis)
            ),
            default=DERIVED,
        )
    return ranks


class _Comparison:
    def __init__(
        self,
        reads: tuple[ReadValue, ...],
        wanted: tuple[Layout, ...],
        wish: Layout | None,
        results: ResultBytes,
        sizes: Sizes,
    ) -> None:
        self.reads, self.wanted, self.wish, self.results = reads, wanted, wish, results
        self.sizes, self.table = sizes, dict(sizes)
        self.homes = tuple([read.home for read in reads])
        self.brought = frozenset(a for home in self.homes for a in home.split_axes)

    def best(self, candidates: Sequence[Option]) -> Option:
        least = min(option.cost(self.sizes).volume for option in candidates)
        for option in candidates:
            if option.ins == self.homes and option.cost(self.sizes).volume == least:
                lost, missed, moved, wire, _ = self._key(option)
                if lost == 1 and not (missed or any(moved) or wire):
                    return option  # no shard is moved: nothing can be better
        return min(candidates, key=self._key)

    def _key(self, option: Option) -> tuple[int, int, tuple[int, ...], float, int]:
        known = option.cost(self.sizes)
        lost = math.prod(self.table[a] for a in self.brought - known.split)
        moved = [0] * (DERIVED + 1)
        wire = 0.0
        for read, layout in zip(self.reads, option.ins, strict=True):
            bytes_sent = sent(read, layout, self.sizes)
            wire += bytes_sent
            if bytes_sent > 0:
                for axis in read.home.split_axes:
                    if read.home.dim_of(axis) != layout.dim_of(axis):
                        moved[read.rank(axis)] += 1
        wire += float(known.exchanged * self.results.exchanged) + self._onward(option)
        if self.results.rounded:
            wire = round(wire)
        return lost, self._missed(option), tuple(moved), wire, known.volume

    def _missed(self, option: Option) -> int:
        """The number of axes that the preferred layout splits and this option splits differently."""
        wish = self.wish
        if wish is None or not option.outs:
            return 0
        out = option.outs[0]
        return sum(
            out.dim_of(a) is not None and out.dim_of(a) != wish.dim_of(a) for a in wish.split_axes
        )

    def _onward(self, option: Option) -> float:
        """The bytes from the results to the preferred layouts; a pending sum costs a psum_scatter."""
        total = 0.0
        for i, (out, item) in enumerate(zip(option.outs, self.results.sizes, strict=True)):
            if i == 0 and self.wanted:
                total += item * sum(self._onward_cost(out, want) for want in self.wanted)
            elif out.awaited:
                k = math.prod(self.table[a] for a in out.awaited)
                total += item * out.largest_local(self.table) * (k - 1) / k
        return total

    def _onward_cost(self, out: Layout, want: Layout) -> float:
        if set(want.pending) <= set(out.pending):
            return cost(out, want, self.sizes)
        return cost(out, want.reduced(), self.sizes)
