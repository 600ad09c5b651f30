"""Quantiles of collectives between computations on two gloo ranks, by the policy of gloo's threads.

    python benchmarks/wakeups.py            two ranks; half a minute

A message wakes a thread of gloo's. If it displaces a thread that holds the lock of the connection, it
asks for the lock until the next tick of the scheduler: up to 4 ms at 250 Hz, for a transfer of 0.1 ms.
How often this happens changes within seconds. After a `Mesh` has been made, such threads displace none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench import aligned, machine
from rivals import on_ranks

from torchard import Mesh

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


def timed(waits: bool) -> list[list[str]]:
    if waits:
        Mesh({"dp": dist.get_world_size()})
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
            how = "waits" if waits else "displaces"
            rows.append([name, how, str(microseconds), *(f"{t:.2f}" for t in each)])
    return rows


def main() -> None:
    rows = [row for waits in (False, True) for row in on_ranks(timed, waits)]
    head = ["collective", "gloo", "µs computed", "5 %", "50 %", "75 %", "90 %", "95 %", "mean"]
    print(f"{machine()}\nmilliseconds of a collective of 4 kB\n{aligned([head, *rows])}")


if __name__ == "__main__":
    main()
