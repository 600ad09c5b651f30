"""Links: the latency and bandwidth of each collective along an axis, timed in chains.

Each collective of a chain reads what the one before has received, so that a chain of k takes k times as
long. What the program computes besides is subtracted, by its prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchard.functional.machines.machine import Link, Machine
from torchard.sharding.manual import collective_api as api
from torchard.sharding.measuring.operations import mean_seconds
from torchard.sharding.redistribute import place
from torchard.sharding.shard_map import shard_map
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P

__all__ = ["fitted", "links_of", "overlap", "seconds_of_call"]

_SIZES = (2**8, 2**14, 2**17, 2**20)  # elements of each rank
_CHAIN, _ROUNDS = 4, 40

ChainStep = Callable[[Tensor, str, int], Tensor]

_KINDS: dict[str, ChainStep] = {
    "all_reduce": lambda x, axis, ranks: api.pvary(api.psum(x, axis) / ranks, axis),
    "all_gather": lambda x, axis, ranks: api.all_gather(x, axis, tiled=True)[: x.shape[0]],
    "psum_scatter": lambda x, axis, ranks: api.psum_scatter(x, axis, tiled=True).repeat(ranks),
    "all_to_all": lambda x, axis, ranks: api.all_to_all(
        x, axis, split_dim=0, concat_dim=0, tiled=True
    ),
    "ppermute": lambda x, axis, ranks: api.ppermute(
        x, axis, [(i, (i + 1) % ranks) for i in range(ranks)]
    ),
}


def links_of(mesh: Mesh, axis: str, machine: Machine) -> dict[str, Link]:
    """The link of each collective along an axis, as all groups along it use it at once."""
    links = {kind: _link(mesh, axis, step, machine) for kind, step in _KINDS.items()}
    return links | {"send": _send(mesh, axis, machine)}


def _link(mesh: Mesh, axis: str, step: ChainStep, machine: Machine) -> Link:
    ranks, free = mesh.shape[axis], replace(machine, link=Link(float("inf")), links={})
    sent, took = [], []

    def chain(x: Tensor) -> Tensor:
        for _ in range(_CHAIN):
            x = step(x, axis, ranks)
        return x

    run = shard_map(chain, mesh, in_specs=P(axis), out_specs=P(axis))
    for size in _SIZES:
        x = place(torch.ones(size * ranks), mesh, P(axis))
        plan = run.lower(x)
        seconds = mean_seconds(lambda x=x: run(x), _ROUNDS)  # type: ignore[misc]
        took.append(max(seconds - plan.time(free).seconds, 1e-6) / _CHAIN)
        sent.append(plan.collectives[0].bytes)
    return fitted(sent, took)


def fitted(sent: Sequence[float], took: Sequence[float]) -> Link:
    """The latency and bandwidth with the smallest squared relative errors."""
    sizes, seconds = torch.tensor([sent, took], dtype=torch.float64)
    terms = torch.stack([torch.ones_like(sizes), sizes], 1) / seconds[:, None]
    latency, per_byte = torch.linalg.lstsq(terms, torch.ones_like(seconds)).solution.tolist()
    return Link(1 / max(per_byte, 1e-15), max(latency, 0.0))


def _send(mesh: Mesh, axis: str, machine: Machine) -> Link:
    """Sends between the first two ranks of each group, there and back.

    The others wait; what the sends would take if they computed as well follows from the machine's speed.
    """
    group = mesh.group([axis])
    first, second, *_ = dist.get_process_group_ranks(group)
    faster = machine.speed(2 / mesh.shape[axis])
    sizes, took = [4 * size for size in _SIZES], []
    for size in _SIZES:
        x = torch.ones(size)

        def there_and_back(x: Tensor = x) -> None:
            if dist.get_rank() == first:
                dist.send(x, second, group)
                dist.recv(x, second, group)
            elif dist.get_rank() == second:
                dist.recv(x, first, group)
                dist.send(x, first, group)

        took.append(faster * mean_seconds(there_and_back, _ROUNDS) / 2)
    return fitted(sizes, took)


def seconds_of_call(mesh: Mesh) -> float:
    """The seconds of a call beside its operations and collectives: ranks agree on it first."""
    axis = mesh.axes[0]

    def seconds(count: int) -> float:
        def chain(x: Tensor) -> Tensor:
            for _ in range(count):
                x = _KINDS["all_reduce"](x, axis, mesh.shape[axis])
            return x

        run = shard_map(chain, mesh, in_specs=P(axis), out_specs=P(axis))
        x = place(torch.ones(mesh.size), mesh, P(axis))
        return mean_seconds(lambda: run(x), 4 * _ROUNDS)

    one = seconds(1)
    return max(one - (seconds(1 + _CHAIN) - one) / _CHAIN, 0.0)


def overlap(mesh: Mesh, axis: str, machine: Machine) -> tuple[float, float]:
    """The shares of the time of bytes, and of a latency, in which a rank can compute."""
    link = machine.link_of([axis], "all_reduce")
    few, many = _SIZES[0], _SIZES[-1]
    busy = _kept_busy(mesh, axis, machine, few, link.latency)
    hides = 1 - busy / max(link.latency, 1e-9)
    sending = 4 * many / link.bandwidth  # float32
    busy = _kept_busy(mesh, axis, machine, many, sending)
    overlaps = 1 - (busy - (1 - min(hides, 1)) * link.latency) / sending
    return min(max(overlaps, 0.0), 1.0), min(max(hides, 0.0), 1.0)


def _kept_busy(mesh: Mesh, axis: str, machine: Machine, size: int, sent: float) -> float:
    """By how much a sum of a size delays what is computed meanwhile, which takes longer than it."""
    ranks = mesh.shape[axis]
    w, x = torch.full((256 * ranks, 256), 1 / 256), torch.ones(size * ranks)
    w, x = place((w, x), mesh, P(axis))
    products = max(int(2 * sent * machine.flops["float32"] / (2 * 256**3)), 1)

    def computed(w: Tensor) -> Tensor:
        for _ in range(products):
            w = w @ w
        return w

    def seconds(fn: Callable[..., Any], out_specs: Any, *args: Any) -> float:
        run = shard_map(fn, mesh, in_specs=P(axis), out_specs=out_specs)
        return mean_seconds(lambda: run(*args), _ROUNDS)

    computing = seconds(computed, P(axis), w) + machine.call
    return seconds(lambda w, x: (api.psum(x, axis), computed(w)), (P(), P(axis)), w, x) - computing
