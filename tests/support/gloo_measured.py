"""Machines measured on real ranks: what `gloo.py` runs of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torchard import Mesh, P, ShapeDtype, machines, shard
from torchard.sharding.measuring import calibration, links, steps
from torchard.sharding.measuring.calibration import Size
from torchard.sharding.values import store_allgather

__all__ = ["CHECKS"]


def measured_machine(rank: int, world: int) -> dict[str, Any]:
    """The machine that each rank has, and the seconds of an all_reduce on it, measured in small sizes."""
    mesh = Mesh({"x": world})
    with (
        mock.patch.object(calibration, "SIZES", (Size(1, 16, 32),)),
        mock.patch.object(links, "_SIZES", (2**8, 2**12, 2**14)),
        mock.patch.multiple(steps, _SMALL=Size(1, 8, 16), _LARGE=Size(1, 16, 32)),
    ):
        machine = machines.measure(mesh)
    product = shard(torch.mm, mesh, (P(None, "x"), P("x")), P())
    time = product.lower(ShapeDtype((64, 64)), ShapeDtype((64, 64))).time(machine)
    (exposed,) = time.exposed
    return {
        "machine": str(machine),
        "links": sorted(machine.links),
        "latencies": [link.latency for link in machine.links.values()],
        "bandwidths": [link.bandwidth for link in machine.links.values()],
        "sent": exposed.sent,
        "predicted": machine.links["x/all_reduce"].seconds(2 * (world - 1) / world * 64 * 64 * 4),
    }


def policies_of_threads(rank: int, world: int) -> list[bool]:
    """Of this thread, and of those that move gloo's messages: whether they displace others."""
    mesh = Mesh({"x": world, "y": 1})
    mesh.group(("x", "y"))  # has a thread of its own
    shard(torch.sum, mesh, P("x"))(torch.ones(world))
    threads = Path("/proc/self/task").iterdir()
    loops = [int(thread.name) for thread in threads if "tcp_loop" in (thread / "comm").read_text()]
    return [os.sched_getscheduler(number) == os.SCHED_OTHER for number in (0, *loops)]


def one_rank_measures_alone(rank: int, world: int) -> list[str]:
    """What rank 0 is told, which alone measures its mesh, and then alone measures itself."""
    mesh, said = Mesh({"x": world}, timeout=3.0), []
    dist.barrier()  # however far apart they are, the others have made the mesh
    for given in (mesh, None) if rank == 0 else ():
        try:
            machines.measure(given)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    if rank:
        next(store_allgather._turns)  # the others catch up with the turn that rank 0 spent
    dist.barrier()
    return said


CHECKS = {
    f.__name__: f for f in (measured_machine, policies_of_threads, one_rank_measures_alone)
}
