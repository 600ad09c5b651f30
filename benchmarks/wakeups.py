"""Quantiles of collectives between computations on two gloo ranks, bound to cores or not.

    python benchmarks/wakeups.py            two ranks; half a minute

A collective passes through threads of gloo's. Linux may wake a thread on a core that computes, where it
waits for the next tick of the scheduler: up to 4 ms at 250 Hz, for a transfer of 0.1 ms. How often this
happens changes within seconds, so a step of a few ms has no time that is its own; `predicted.py` shows by
how much such steps are mispredicted.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench import aligned, machine
from rivals import on_ranks

SIZE, ROUNDS, WARMUP = 1024, 300, 20
COMPUTED = (0, 100, 300, 1000)  # microseconds between collectives


def compute(microseconds: int) -> None:
    w = torch.ones(64, 64) / 64
    end = time.perf_counter() + microseconds * 1e-6
    while time.perf_counter() < end:
        torch.mm(w, w)


def collectives() -> dict[str, Callable[[], Any]]:
    """Each sends 4 kB from either rank to the other."""
    x, received, both = torch.ones(SIZE), torch.empty(SIZE), list(torch.empty(2, SIZE))
    other = 1 - dist.get_rank()

    def sends() -> None:
        sent, arrives = dist.isend(x, other), dist.irecv(received, other)
        assert sent is not None and arrives is not None
        arrives.wait()
        sent.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather(both, x),
        "all_to_all": lambda: dist.all_to_all_single(received, x),
        "isend and irecv": sends,
    }


def timed(bound: bool) -> list[list[str]]:
    if bound:
        os.sched_setaffinity(0, {dist.get_rank() % (os.cpu_count() or 1)})
    rows = []
    for name, run in collectives().items():
        for microseconds in COMPUTED:
            took = []
            dist.barrier()
            for _ in range(WARMUP + ROUNDS):
                compute(microseconds)
                began = time.perf_counter()
                run()
                took.append(1e3 * (time.perf_counter() - began))
            cuts = statistics.quantiles(took[WARMUP:], n=20)
            each = [cuts[0], cuts[9], cuts[14], cuts[17], cuts[18], statistics.fmean(took[WARMUP:])]
            where = "bound" if bound else "free"
            rows.append([name, where, str(microseconds), *(f"{t:.2f}" for t in each)])
    return rows


def main() -> None:
    rows = [row for bound in (False, True) for row in on_ranks(timed, bound)]
    head = ["collective", "ranks", "µs computed", "5 %", "50 %", "75 %", "90 %", "95 %", "mean"]
    print(f"{machine()}\nmilliseconds of a collective of 4 kB\n{aligned([head, *rows])}")


if __name__ == "__main__":
    main()
