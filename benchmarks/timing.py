"""Measuring rivals fairly: in turns, in one process, so that whatever disturbs one disturbs all."""

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

__all__ = ["Timing", "in_turns", "per_call"]


@dataclass(frozen=True)
class Timing:
    """Seconds of every repetition, the slower rank's."""

    name: str
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return low, high


def in_turns(rivals: Sequence[Rival], rounds: int, warmup: int = 3) -> list[Timing]:
    """Every rival once in each round, in an order that moves on by one each time."""
    took: list[list[float]] = [[] for _ in rivals]
    gc.collect()
    gc.disable()
    for number in range(warmup + rounds):
        for turn in range(len(rivals)):
            which = (turn + number) % len(rivals)
            seconds = _timed(rivals[which].run)
            if number >= warmup:
                took[which].append(seconds)
        gc.collect()
    gc.enable()
    slowest = torch.tensor(took, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [Timing(r.name, row) for r, row in zip(rivals, slowest.tolist(), strict=True)]


def _timed(run: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    result = run()
    seconds = time.perf_counter() - began
    del result
    return seconds


def per_call(call: Callable[[], Any], budget: float = 0.2, blocks: int = 15) -> float:
    """Seconds that one call takes: the median over blocks of calls, `budget` seconds in all."""
    call()
    began = time.perf_counter()
    call()
    once = max(time.perf_counter() - began, 1e-6)
    calls = max(1, int(budget / blocks / once))
    means = []
    for _ in range(blocks):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - began) / calls)
    return statistics.median(means)
