"""The machine that runs this process, as each rank of a mesh sees it."""

from __future__ import annotations

import datetime
import functools
import os
import platform
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.jit import jit
from torchard.functional.machines.machine import Link, Machine
from torchard.functional.remat.liveness import as_run
from torchard.functional.trace import trace
from torchard.sharding.measuring import calibration
from torchard.sharding.measuring.links import links_of, overlap, seconds_of_call
from torchard.sharding.measuring.operations import Sample, mean_of_ranks, median_seconds, timed
from torchard.sharding.measuring.rates import Rates, explained
from torchard.sharding.measuring.steps import as_in_steps
from torchard.sharding.values.mesh import Mesh, MeshError
from torchard.sharding.values.store_allgather import exchange

__all__ = ["measure"]

_ROUNDS = 7
_ALL_MEASURE = (
    "All ranks of the mesh are measured at once: call machines.measure(mesh) on every one of them."
)
_DTYPES = (torch.float64, torch.bfloat16, torch.float16)


@checked
def measure(mesh: Mesh | None = None) -> Machine:
    """Measure the machine that runs this: operations, and along each axis of a mesh the collectives.

    All ranks of the mesh take part at once, so that rates are those of ranks that share processors and
    memory, and all return one machine. It takes some seconds, of which nothing else should run.

    Args:
        mesh: the mesh; without one, a single process is measured.

    Returns:
        The machine; ``save`` writes it to a file.

    Raises:
        MeshError: the mesh is virtual: its ranks are simulated, and have no rates; or there is none,
            and this process is one of several.
        ExchangeError: a rank of the mesh has not called this within the mesh's timeout; names it.

    Source: Hockney, "The communication challenge for MPP", 1994, for collectives; Williams, Waterman and
    Patterson, "Roofline", 2009, for operations.

    >>> from torchard import machines
    >>> machine = machines.measure()                                        # doctest: +SKIP
    >>> machine.save("host.json")                                           # doctest: +SKIP
    """
    if mesh is not None and mesh.virtual:
        raise MeshError(
            f"measure: {mesh} is virtual: one process simulates all ranks, which have no time of their "
            "own. Measure a mesh of processes, or one process by measure()."
        )
    _meet(mesh)
    machine = _of_rates(explained(_samples()))
    machine = replace(machine, flops=_of_dtypes(machine), call=_call())
    return machine if mesh is None else _on(mesh, machine)


def _meet(mesh: Mesh | None) -> None:
    """Wait until all ranks are about to measure: they meet at each operation, without another message."""
    if mesh is None and _ranks() > 1:
        raise MeshError(
            f"measure() measures one process, and this is one of {_ranks()}: call measure(mesh) with a "
            "mesh of them, on every rank."
        )
    if mesh is not None and mesh.size > 1:
        exchange(mesh, f"that it called machines.measure({mesh})", None, remedy=_ALL_MEASURE)


def _of_rates(rates: Rates) -> Machine:
    return Machine(
        platform.node() or "host",
        flops={"float32": rates.flops},
        bandwidth=rates.bandwidth,
        launch=rates.launch,
        view=rates.view,
        efficiency=rates.efficiency,
        memory=_memory(),
        source=f"measured on {datetime.date.today()} with PyTorch {torch.__version__}",
    )


def _samples() -> list[Sample]:
    """The operations of a training step in several sizes; together they take as long as its call.

    Ranks that share processors take longer than they compute, a call frees memory, and runs code between
    its operations: all by the same factor.
    """
    samples: list[Sample] = []
    for size in calibration.SIZES:
        args = calibration.values(size)
        program = as_run(trace(calibration.step)(*args))
        each = timed(program, tree.leaves(args), _ROUNDS)
        call = functools.partial(jit(calibration.step, backend="eager"), *args)
        longer = median_seconds(call, _ROUNDS) / sum(s.seconds for s in each)
        samples += [s._replace(seconds=longer * s.seconds) for s in each]
    return samples


def _of_dtypes(machine: Machine) -> dict[str, float]:
    """The rate of products in each dtype, relative to that in float32."""
    single, *others = mean_of_ranks(
        median_seconds(lambda a=a, b=b: a @ b, _ROUNDS)  # type: ignore[misc]
        for a, b in calibration.products([torch.float32, *_DTYPES])
    )
    rates = {
        str(dtype).removeprefix("torch."): machine.flops["float32"] * single / seconds
        for dtype, seconds in zip(_DTYPES, others, strict=True)
    }
    return {**machine.flops, **rates}


def _call() -> float:
    run, x = jit(torch.neg, backend="eager"), torch.ones(())
    (seconds,) = mean_of_ranks([median_seconds(lambda: run(x), 4 * _ROUNDS)])
    return seconds


def _memory() -> int:
    """The memory of the host, for each of its processes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(total // (int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or _ranks()))


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _on(mesh: Mesh, machine: Machine) -> Machine:
    """The machine with the links of a mesh's axes."""
    machine = replace(machine, call=seconds_of_call(mesh), alone=_alone())
    links: dict[str, Link] = {}
    shares: list[tuple[float, float]] = []
    for axis in (a for a in mesh.axes if mesh.shape[a] > 1):
        of_axis = links_of(mesh, axis, machine)
        links[axis] = of_axis["all_reduce"]
        links |= {f"{axis}/{kind}": each for kind, each in of_axis.items()}
        shares.append(overlap(mesh, axis, replace(machine, links=links)))
    slowest = min(links.values(), key=lambda link: link.bandwidth, default=machine.link)
    overlaps, hides = (min(each) for each in zip(*shares, strict=True)) if shares else (1.0, 1.0)
    parts = replace(machine, links=links, link=slowest, overlaps=overlaps, hides=hides)
    return as_in_steps(mesh, _agreed(parts)) if links else parts


def _alone() -> float:
    """How many times as fast the first rank computes while no other does."""
    a, b = next(calibration.products([torch.float32]))

    def run() -> Any:
        return [a @ b for _ in range(20)]

    together = median_seconds(run, _ROUNDS)
    dist.barrier()
    single = median_seconds(run, _ROUNDS, meet=False) if dist.get_rank() == 0 else together
    dist.barrier()
    found = torch.tensor([single], dtype=torch.float64)
    dist.broadcast(found, 0)
    return max(together / found.item(), 1.0)


def _agreed(machine: Machine) -> Machine:
    """The first rank's machine, on all of them."""
    found = [machine]
    dist.broadcast_object_list(found, 0)
    return found[0]
