"""Runs of a sequence that repeat: where, and with what period."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["PeriodicRun", "runs"]

# Periods that are tried for one run: the most frequent distances between equal symbols.
_TRIED = 32
# Single symbols are equal at many distances; words of four at few others than periods.
_LENGTHS = (1, 2)


@dataclass(frozen=True)
class PeriodicRun:
    """Symbols ``start``, ..., ``stop - 1``, each equal to the one a period before it among them.

    >>> from torchard.functional.loops.periods import PeriodicRun
    >>> PeriodicRun(start=2, stop=11, period=3).count
    3
    """

    start: int
    stop: int
    period: int

    @property
    def count(self) -> int:
        """How many whole periods there are."""
        return (self.stop - self.start) // self.period


def runs(symbols: Sequence[int], times: int, least: int) -> list[PeriodicRun]:
    """Disjoint runs of a sequence, in order; runs that repeat the most symbols are found first.

    Args:
        symbols: one number per item; equal items have equal numbers; none is negative.
        times: the least number of times that a period occurs.
        least: the least number of symbols that equal the symbol one period before.

    >>> from torchard.functional.loops.periods import runs
    >>> runs([7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 9], times=3, least=6)
    [PeriodicRun(start=1, stop=11, period=3)]
    """
    left = np.asarray(symbols, dtype=np.int64).copy()
    found: list[PeriodicRun] = []
    while (run := _longest(left, times)) is not None and run.stop - run.start - run.period >= least:
        found.append(run)
        left[run.start : run.stop] = -1 - np.arange(run.start, run.stop)  # equal to nothing
    return sorted(found, key=lambda run: run.start)


def _longest(symbols: Any, times: int) -> PeriodicRun | None:
    """The run that repeats the most symbols; the one of the shorter period, if several do."""
    found: list[PeriodicRun] = []
    for period in _periods(symbols):
        equal = symbols[:-period] == symbols[period:]
        for start, stop in _stretches(equal):
            run = PeriodicRun(start, stop + period, period)
            if run.count >= times:
                found.append(run)
    return min(found, key=lambda run: (run.start + run.period - run.stop, run.period), default=None)


def _periods(symbols: Any) -> list[int]:
    """The most frequent distances from a few symbols in a row to the next that equal them."""
    words = symbols
    for length in _LENGTHS:
        words = np.unique(words, return_inverse=True)[1]
        words = words[:-length] * len(words) + words[length:]
    order = np.argsort(words, kind="stable")
    equal = words[order[:-1]] == words[order[1:]]
    distances, counts = np.unique((order[1:] - order[:-1])[equal], return_counts=True)
    return [int(d) for d in distances[np.argsort(-counts * distances, kind="stable")][:_TRIED]]


def _stretches(flags: Any) -> Iterator[tuple[int, int]]:
    """Where flags are set: first, and one after the last."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
