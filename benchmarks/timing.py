"""Timing of rivals in turns and in one process, so that a disturbance affects all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from workload import Rival

__all__ = ["Timing", "in_turns", "per_call", "together"]


@dataclass(frozen=True)
class Timing:
    """The seconds of every repetition, those of the slowest rank."""

    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return low, high

    def times(self, other: Timing) -> float:
        """The ratio to the time of another rival in the same round, as the median over rounds.

        A disturbance that lasts longer than a round affects both, and cancels.
        """
        return statistics.median(self._ratios(other))

    def quartiles_of_times(self, other: Timing) -> tuple[float, float]:
        """The quartiles of these ratios."""
        low, _, high = statistics.quantiles(self._ratios(other), n=4)
        return low, high

    def _ratios(self, other: Timing) -> list[float]:
        return [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]


Clock = Callable[[], float]


def in_turns(
    rivals: Sequence[Rival], rounds: int, warmup: int = 3, clock: Clock = time.perf_counter
) -> list[Timing]:
    """Time every rival once in each round, in an order that is rotated by one each time."""
    took: list[list[float]] = [[] for _ in rivals]
    gc.collect()
    gc.disable()
    for number in range(warmup + rounds):
        for turn in range(len(rivals)):
            which = (turn + number) % len(rivals)
            seconds = _timed(rivals[which].run, clock)
            if number >= warmup:
                took[which].append(seconds)
        gc.collect()
    gc.enable()
    slowest = torch.tensor(took, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [Timing(r.name, row) for r, row in zip(rivals, slowest.tolist(), strict=True)]


def _timed(run: Callable[[], Any], clock: Clock) -> float:
    if dist.is_initialized():
        dist.barrier()
    began = clock()
    result = run()
    seconds = clock() - began
    del result
    return seconds


def per_call(call: Callable[[], Any], budget: float = 0.2, blocks: int = 15) -> float:
    """The processor time of one call in this thread, in seconds, measured for `budget` seconds.

    For calls that do not wait for other processes, whose load has no effect. The result is the median
    over blocks of calls.
    """
    call()
    began = time.thread_time()
    call()
    once = max(time.thread_time() - began, 1e-6)
    calls = max(1, int(budget / blocks / once))
    means = []
    for _ in range(blocks):
        began = time.thread_time()
        for _ in range(calls):
            call()
        means.append((time.thread_time() - began) / calls)
    return statistics.median(means)


def together(call: Callable[[], Any], calls: int = 100, blocks: int = 9) -> float:
    """The seconds of a call in which ranks wait for each other; all ranks make the same number of calls.

    The result is the median over blocks of calls.
    """
    means = []
    for _ in range(blocks):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - began) / calls)
    return statistics.median(means)
