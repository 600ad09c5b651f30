"""Whole training steps on a mesh: by how much longer they take than their parts, timed alone.

Between collectives operations find caches cold, collectives find ranks computing, and ranks that share
processors are interrupted. A small step, which launches operations and collectives, and a large one,
which computes and sends, each give one factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchard.functional.core import tree
from torchard.functional.machines.machine import Link, Machine
from torchard.sharding.measuring import calibration
from torchard.sharding.measuring.calibration import Size
from torchard.sharding.measuring.operations import mean_seconds
from torchard.sharding.redistribute import place
from torchard.sharding.shard import shard
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P

__all__ = ["as_in_steps"]

_ROUNDS = 24
# Sequences of each rank, tokens of each, and a width: of a step of few and of one of many elements.
_SMALL, _LARGE = Size(2, 8, 32), Size(2, 64, 256)


def as_in_steps(mesh: Mesh, machine: Machine) -> Machine:
    """The machine on which a small and a large step take as long as they do on this mesh."""
    machine = _slower(machine, launching=_longer(mesh, machine, _SMALL))
    return _slower(machine, moving=_longer(mesh, machine, _LARGE))


def _longer(mesh: Mesh, machine: Machine, size: Size) -> float:
    """How many times as long as predicted a fully sharded step takes."""
    *state, tokens, targets = calibration.values(size._replace(batch=size.batch * mesh.size))
    split = tree.map(lambda x: place(x, mesh, P(mesh.axes[0]) if x.ndim else P()), state)
    args: Any = (*split, *place((tokens, targets), mesh, P(mesh.axes)))
    run = shard(calibration.step, mesh)
    seconds = mean_seconds(lambda: run(*args), _ROUNDS)
    return seconds / run.lower(*args).time(machine).seconds


def _slower(machine: Machine, launching: float = 1.0, moving: float = 1.0) -> Machine:
    """A machine whose launches and latencies, or whose rates, are slower by a factor."""

    def slower(link: Link) -> Link:
        return Link(link.bandwidth / moving, link.latency * launching)

    links = {name: slower(link) for name, link in machine.links.items()}
    return replace(machine.slowed(launching, moving), link=slower(machine.link), links=links)
