"""The plan of a program: on a given machine, the minimum of its time (`planning/minimum/`).

Without one, the plan by propagation (`planning/propagation/`), or the minimum along its axes if that is
better. A minimum may send less by more collectives, or by computing more; so it replaces a plan if it
takes less time on all of four machines: with and without a latency, computing fast and slowly.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from torchard.functional.costs.flops import is_product
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import COLLECTIVE, VAL
from torchard.sharding.planning.decision import Given, Plan, seconds_per_point
from torchard.sharding.planning.minimum.minimum import minimized
from torchard.sharding.planning.minimum.model import link_within
from torchard.sharding.planning.minimum.plan import planned
from torchard.sharding.planning.propagation.plan import choose, lost_axes
from torchard.sharding.scheduling.partition import partition
from torchard.sharding.values.mesh import Mesh

__all__ = ["Figures", "improved_plan"]

_LATENCIES = (0.0, 64e-6)  # seconds: none, and that of 64 KB of what is sent
_SLOWER = (1.0, 8.0)  # how many times as long computing takes
# The largest part of what a plan sends or computes with which it is replaced; and that by fewer calls.
_MOST, _MOST_BY_FEWER = 0.6, 0.75


class Figures(NamedTuple):
    """What a plan costs on each rank.

    Attributes:
        sending: seconds of sending.
        calls: collectives between products; all others are merged if they are of one kind and wait for
            as many.
        work: seconds that the busiest rank computes.
    """

    sending: float
    calls: int
    work: float

    def dominates(self, other: Figures, latencies: Iterable[float] = _LATENCIES) -> bool:
        """Whether a plan is faster than another on each machine, and much less is sent or computed."""
        most = _MOST_BY_FEWER if self.calls < other.calls else _MOST
        if self.sending > most * other.sending and self.work > most * other.work:
            return False
        machines = itertools.product(latencies, _SLOWER)
        return all(self.seconds(*machine) < other.seconds(*machine) for machine in machines)

    def seconds(self, latency: float, slower: float) -> float:
        return self.sending + latency * self.calls + slower * self.work


class _Candidate:
    """A plan, with its SPMD graph and its figures."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh

    @functools.cached_property
    def spmd(self) -> fx.Graph:
        return partition(self.plan.graph, self.plan.given, self.plan.decision, self.mesh.sizes)

    @functools.cached_property
    def figures(self) -> Figures:
        return _figures(self.plan, self.spmd, self.mesh)

    def rank(self) -> tuple[int, float]:
        """Smallest for the better plan: the one that splits more, then the one that takes less time."""
        lost = lost_axes(self.plan, self.mesh)
        return len(lost), self.figures.seconds(_LATENCIES[-1], _SLOWER[0])

    def or_better(self, plan: Plan) -> _Candidate:
        """This one, or another plan if that is better: if it splits more, whatever its calls take."""
        new = _Candidate(plan, self.mesh)
        lost, known = lost_axes(plan, self.mesh), lost_axes(self.plan, self.mesh)
        latencies = _LATENCIES[:1] if lost < known else _LATENCIES
        return new if lost <= known and new.figures.dominates(self.figures, latencies) else self


def improved_plan(graph: fx.Graph, given: Given, mesh: Mesh) -> tuple[Plan, fx.Graph]:
    """The plan of a program, and its SPMD graph.

    Without a machine, operations on local values are not planned again.
    """
    if given.on:
        plan = planned(graph, given, mesh)
        return plan, partition(plan.graph, plan.given, plan.decision, mesh.sizes)
    plan = choose(graph, given, mesh)
    found = [_improved(plan, mesh)]
    if plan.decision.tied:
        found.append(_improved(choose(graph, replace(given, handed_first=True), mesh), mesh))
    best = min(found, key=_Candidate.rank) if len(found) > 1 else found[0]
    return best.plan, best.spmd


def _improved(plan: Plan, mesh: Mesh) -> _Candidate:
    """A plan, or the minimum along its axes if that is better."""
    best = _Candidate(plan, mesh)
    if axes := [] if plan.given.local else plan.given.planned_axes(mesh.sizes):
        known = replace(plan.given, outputs=plan.decision.outputs)
        found = minimized(plan.graph, known, mesh.sizes, plan.decision, axes)
        if found.decision is not plan.decision:
            best = best.or_better(replace(plan, decision=found.decision))
    return best


def _figures(plan: Plan, spmd: fx.Graph, mesh: Mesh) -> Figures:
    """What a plan costs; a value that several users read in one layout is moved once."""
    machine = plan.given.target
    needed, late, waits = _before_products(spmd), set[fx.Node](), dict[fx.Node, int]()
    sending, calls, merged = 0.0, 0, set[object]()
    for node in spmd.nodes:
        if any(n in late or is_product(n) for n in node.all_input_nodes):
            late.add(node)
        waits[node] = max((waits[n] for n in node.all_input_nodes), default=0)
        if COLLECTIVE.on(node):
            sent = COLLECTIVE.of(node)
            link, group = machine.link_of(sent.axes, sent.kind), (waits[node], sent.kind, sent.axes)
            sending += sent.bytes * times(node) / link.bandwidth
            waits[node] += 1
            if node in late and node in needed:
                calls += times(node)
            else:
                calls += group not in merged
                merged.add(group)
    work = 0.0
    for node, option in plan.decision.option.items():
        cost = option.cost(mesh.sizes)
        work += cost.work * seconds_per_point(node, machine)
        if cost.exchanged:
            link, size = link_within(cost, machine), cost.exchanged * VAL.of(node).dtype.itemsize
            sending += times(node) * size / link.bandwidth
    return Figures(sending, calls, work)


def _before_products(graph: fx.Graph) -> set[fx.Node]:
    """The nodes on which a product depends."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in found or is_product(node):
            found.update(node.all_input_nodes)
    return found
