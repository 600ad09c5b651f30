"""The seconds of reshards: of one element, by the axes' bandwidths; and of latencies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from torchard.functional.machines.machine import Machine
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.reshard import ReshardStep, common, plan
from torchard.sharding.planning.minimum.elimination import Table, TooWide

__all__ = ["Reshards"]

_MOST = 4000  # pairs of layouts
_FIRST = 1e-12  # seconds of a collective: of equal plans, that with the fewest is chosen


class _Seconds(NamedTuple):
    """The seconds of a reshard for each byte of an element, and for each time it is done."""

    per_byte: float
    per_time: float


class _Move(NamedTuple):
    """A step of a reshard, and the elements of the largest shards before and after it."""

    step: ReshardStep
    before: int
    after: int


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
        self._evenly: dict[_Pattern, list[_Move]] = {}  # of elements, the ranks that share them
        self._tables: dict[object, Table] = {}

    def seconds(
        self, have: Layout, want: Layout, itemsize: int, times: int, calls: float
    ) -> float:
        """The seconds from one layout to another; infinite where there is no way.

        Args:
            calls: the part of a latency that each collective has.
        """
        each = self._each(have, want)
        return times * (each.per_byte * itemsize + each.per_time * calls)

    def _each(self, have: Layout, want: Layout) -> _Seconds:
        known = self._known.get((have, want))
        if known is None:
            if len(self._known) >= self.most:
                raise TooWide
            known = self._known[have, want] = self._found(have, want)
        return known

    def _found(self, have: Layout, want: Layout) -> _Seconds:
        if set(want.pending) - set(have.pending) or have.varying != want.varying:
            return _Seconds(float("inf"), 0.0)
        pattern, elements = self._pattern(have, want), math.prod(have.shape)
        if pattern is None or not elements:
            return self._seconds(self._moves(have, want))
        if pattern not in self._evenly:
            self._evenly[pattern] = [
                move._replace(before=elements // move.before, after=elements // move.after)
                for move in self._moves(have, want)
            ]
        each = self._evenly[pattern]
        return self._seconds(
            m._replace(before=elements // m.before, after=elements // m.after) for m in each
        )

    def _moves(self, have: Layout, want: Layout) -> list[_Move]:
        table = dict(self.sizes)
        return [
            _Move(step, step.before.largest_local(table), step.after.largest_local(table))
            for step in plan(have, want, self.sizes)
        ]

    def _seconds(self, moves: Iterable[_Move]) -> _Seconds:
        table, per_byte, per_time = dict(self.sizes), 0.0, 0.0
        for step, before, after in moves:
            if step.collective.sends:
                link = self.machine.link_of(step.axes, step.kind)
                ranks = math.prod(table[a] for a in step.axes)
                per_byte += step.collective.elements(before, after, ranks) / link.bandwidth
                per_time += link.latency + _FIRST
            else:
                per_time += _FIRST / 10
        return _Seconds(per_byte, per_time)

    def _pattern(self, have: Layout, want: Layout) -> _Pattern | None:
        """The axes of each sub-dim before and after, in any order; None if one is split unevenly."""
        cut, pairs = common(have, want, self.sizes), []
        if cut is None:
            return None
        for before, after in zip(*(itertools.chain(*x.dims) for x in cut), strict=True):
            if before.axes or after.axes:
                axes = {*before.axes, *after.axes}
                if before.size % math.prod(n for axis, n in self.sizes if axis in axes):
                    return None
                pairs.append((before.axes, after.axes))
        return (*sorted(pairs), have.pending, want.pending)

    def table(
        self,
        have: tuple[Layout, ...],
        want: tuple[Layout, ...],
        itemsize: int,
        times: int,
        calls: float,
    ) -> Table:
        """The seconds from each layout to each other one; equal tables are one object."""
        key = have, want, itemsize, times, calls
        if key not in self._tables:
            rows = [[self.seconds(h, w, itemsize, times, calls) for w in want] for h in have]
            self._tables[key] = np.array(rows, dtype=np.float64).reshape(len(have), len(want))
        return self._tables[key]
