"""The seconds of reshards: of one element, by the axes' bandwidths; and of latencies."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from torchard.functional.machines.machine import Machine
from torchard.sharding.layouts.layout import Axes, Dim, Layout, Sizes
from torchard.sharding.layouts.reshard import common_dim, plan
from torchard.sharding.planning.minimum.elimination import Table, TooWide

__all__ = ["Calls", "Reshards"]

_MOST = 4000  # pairs of layouts
_FIRST = 1e-12  # seconds of a collective: of equal plans, that with the fewest is chosen


class Calls(NamedTuple):
    """The part of a call's latency that a collective has: if it sums, and if it does not."""

    sums: float = 1.0
    moves: float = 1.0


class _Seconds(NamedTuple):
    """The seconds of a reshard for each byte of an element, and of the latencies of its collectives."""

    per_byte: float
    sums: float
    moves: float


_Pattern = tuple[Any, ...]


class Reshards:
    """The costs of reshards on one mesh of one machine.

    Where dims are split evenly, what is sent is a share of the elements, which depends only on the axes
    that split each dim before and after. So few reshards are searched for.

    Raises:
        TooWide: too many are asked for.
    """

    def __init__(self, sizes: Sizes, machine: Machine, most: int = _MOST) -> None:
        self.sizes, self.machine, self.most = sizes, machine, most
        self._known: dict[tuple[Layout, Layout], _Seconds] = {}
        self._evenly: dict[_Pattern, _Seconds] = {}  # of one element
        self._tables: dict[object, Table] = {}

    def seconds(
        self, have: Layout, want: Layout, itemsize: int, times: int, calls: Calls
    ) -> float:
        """The seconds from one layout to another; infinite where there is no way."""
        each = self._each(have, want)
        latencies = each.sums * calls.sums + each.moves * calls.moves
        return times * (each.per_byte * itemsize + latencies)

    def _each(self, have: Layout, want: Layout) -> _Seconds:
        known = self._known.get((have, want))
        if known is None:
            if len(self._known) >= self.most:
                raise TooWide
            known = self._known[have, want] = self._found(have, want)
        return known

    def _found(self, have: Layout, want: Layout) -> _Seconds:
        if set(want.pending) - set(have.pending) or have.varying != want.varying:
            return _Seconds(float("inf"), 0.0, 0.0)
        elements = math.prod(have.shape)
        pattern = self._pattern(have, want) if elements else None
        if pattern is None:
            return self._searched(have, want)
        if pattern not in self._evenly:
            known = self._searched(have, want)
            self._evenly[pattern] = known._replace(per_byte=known.per_byte / elements)
        each = self._evenly[pattern]
        return _Seconds(each.per_byte * elements, each.sums, each.moves)

    def _searched(self, have: Layout, want: Layout) -> _Seconds:
        per_byte, sums, moves = 0.0, 0.0, 0.0
        for step in plan(have, want, self.sizes):
            latency = _FIRST / 10
            if step.collective.sends:
                link = self.machine.link_of(step.axes, step.kind)
                per_byte += step.elements(self.sizes) / link.bandwidth
                latency = link.latency + _FIRST
            if step.reduction is None:
                moves += latency
            else:
                sums += latency
        return _Seconds(per_byte, sums, moves)

    def _pattern(self, have: Layout, want: Layout) -> _Pattern | None:
        """The axes of each sub-dim before and after, in any order; None if one is split unevenly."""
        pairs: list[tuple[Axes, Axes]] = []
        for before, after in zip(have.dims, want.dims, strict=True):
            if before is not after or any(sub.axes for sub in before):
                found = _evenly_split(before, after, self.sizes)
                if found is None:
                    return None
                pairs += found
        return (*sorted(pairs), have.pending, want.pending)

    def table(
        self,
        have: tuple[Layout, ...],
        want: tuple[Layout, ...],
        itemsize: int,
        times: int,
        calls: Calls,
    ) -> Table:
        """The seconds from each layout to each other one; equal tables are one object."""
        key = have, want, itemsize, times, calls
        if key not in self._tables:
            rows = [[self.seconds(h, w, itemsize, times, calls) for w in want] for h in have]
            self._tables[key] = np.array(rows, dtype=np.float64).reshape(len(have), len(want))
        return self._tables[key]


@functools.lru_cache(maxsize=16384)
def _evenly_split(before: Dim, after: Dim, sizes: Sizes) -> tuple[tuple[Axes, Axes], ...] | None:
    """The axes of each split sub-dim of a dim, before and after; None if one is split unevenly."""
    cut, pairs = common_dim(before, after, sizes), []
    if cut is None:
        return None
    for b, a in zip(*cut, strict=True):
        axes = {*b.axes, *a.axes}
        if axes and b.size % math.prod(n for axis, n in sizes if axis in axes):
            return None
        if axes:
            pairs.append((b.axes, a.axes))
    return tuple(pairs)
