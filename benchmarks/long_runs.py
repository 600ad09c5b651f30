"""Resident memory of long runs: a thousand shapes, and closures that are replaced at every call.

Each workload runs in its own process, which reports its resident memory in MiB at regular intervals. What
is kept is bounded: 256 signatures of each transform, 16,384 entries of each of the planner's caches and
of torch's cache of fake results, and 1,024 primitives of oneDNN, one per shape of a product (some 60 KiB
each, which plain torch keeps too). So but for the latter, memory must stop growing after some 250 shapes.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from torchard import Mesh, P, RetraceWarning, checkpoint, fuse, shard

WIDTH = 16
Call = Callable[[int], Any]


def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x + F.gelu(F.linear(x, w, b)), (WIDTH,), b, b).square().mean()


def parameters() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)


def fused() -> Call:
    run = torch.func.grad(fuse(block, compiler="eager"), (1, 2))
    weights = parameters()
    return lambda i: run(torch.randn(i + 2, WIDTH), *weights)


def checkpointed() -> Call:
    run = torch.func.grad(checkpoint(block), (1, 2))
    weights = parameters()
    return lambda i: run(torch.randn(i + 2, WIDTH), *weights)


def sharded() -> Call:
    mesh = Mesh({"tp": 2}, virtual=True)
    run = torch.func.grad(shard(block, mesh, in_specs=(P(), P("tp"), P("tp"))), (1, 2))
    weights = parameters()
    return lambda i: run(torch.randn(i + 2, WIDTH), *weights)


def closures() -> Call:
    """A function that closes over a tensor of 8 MiB, which is replaced at every call."""
    held = {"table": torch.zeros(0)}
    run = checkpoint(lambda x: (x * held["table"][: len(x)]).sum())

    def call(i: int) -> Any:
        held["table"] = torch.randn(2 << 20)
        return run(torch.randn(i + 2))

    return call


WORKLOADS = {f.__name__: f for f in (fused, checkpointed, sharded, closures)}


def resident() -> float:
    """The resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def measured(name: str, calls: int, points: int) -> list[float]:
    """The resident memory at `points` regular intervals of the calls."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RetraceWarning)  # the workloads retrace on purpose
    call = WORKLOADS[name]()
    return list(_sampled(call, calls, points))


def _sampled(call: Call, calls: int, points: int) -> Iterator[float]:
    for i in range(calls):
        call(i)
        if (i + 1) % (calls // points) == 0:
            gc.collect()
            yield resident()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="a tenth of the calls")
    parser.add_argument("--only", choices=WORKLOADS)
    options = parser.parse_args()
    calls, points = options.calls // (10 if options.quick else 1), 10
    names = [options.only] if options.only else list(WORKLOADS)
    print(f"resident memory, MiB, torch {torch.__version__}, {calls} calls, each of a new shape")
    print("calls".rjust(14), *(f"{(k + 1) * calls // points:>7}" for k in range(points)))
    # Otherwise glibc would keep and split large freed blocks, and its fragmentation would be measured.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            row = pool.apply(measured, (name, calls, points))
            print(name.rjust(14), *(f"{value:7.0f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
