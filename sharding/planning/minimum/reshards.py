"""The seconds of reshards: of one element, by the axes' bandwidths; and of latencies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torchard.functional.machines.machine import Machine
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.reshard import plan
from torchard.sharding.planning.minimum.elimination import Table, TooWide

__all__ = ["Reshards"]

_MOST = 4000  # pairs of layouts
_FIRST = 1e-12  # seconds of a collective: of equal plans, that with the fewest is chosen


class _Seconds(NamedTuple):
    """The seconds of a reshard for each byte of an element, and for each time it is done."""

    per_byte: float
    per_time: float


class Reshards:
    """The costs of reshards on one mesh of one machine.

    Raises:
        TooWide: too many are asked for.
    """

    def __init__(self, sizes: Sizes, machine: Machine, most: int = _MOST) -> None:
        self.sizes, self.machine, self.most = sizes, machine, most
        self._known: dict[tuple[Layout, Layout], _Seconds] = {}
        self._tables: dict[object, Table] = {}

    def seconds(self, have: Layout, want: Layout, itemsize: int, times: int) -> float:
        """The seconds from one layout to another; infinite where there is no way."""
        each = self._each(have, want)
        return times * (each.per_byte * itemsize + each.per_time)

    def _each(self, have: Layout, want: Layout) -> _Seconds:
        known = self._known.get((have, want))
        if known is None:
            if len(self._known) >= self.most:
                raise TooWide
            known = self._known[have, want] = self._searched(have, want)
        return known

    def _searched(self, have: Layout, want: Layout) -> _Seconds:
        if set(want.pending) - set(have.pending) or have.varying != want.varying:
            return _Seconds(float("inf"), 0.0)
        per_byte = per_time = 0.0
        for step in plan(have, want, self.sizes):
            if step.collective.sends:
                link = self.machine.link_of(step.axes, step.kind)
                per_byte += step.elements(self.sizes) / link.bandwidth
                per_time += link.latency + _FIRST
            else:
                per_time += _FIRST / 10
        return _Seconds(per_byte, per_time)

    def table(
        self, have: tuple[Layout, ...], want: tuple[Layout, ...], itemsize: int, times: int
    ) -> Table:
        """The seconds from each layout to each other one; equal tables are one object."""
        key = have, want, itemsize, times
        if key not in self._tables:
            rows = [[self.seconds(h, w, itemsize, times) for w in want] for h in have]
            self._tables[key] = np.array(rows, dtype=np.float64).reshape(len(have), len(want))
        return self._tables[key]
