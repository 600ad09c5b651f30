"""A plan, or the minimum along its axes (`planning/minimum/`) if that is better on any machine.

A plan may send less by more collectives, or by computing more. So two plans are compared as they are
sent, on machines of which one has no latency, and one whose latency is half of what a collective's bytes
take; of which one computes slowly, and one fast.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

from torch import fx

from torchard.functional.costs.flops import is_product
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import STEP, VAL
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.planning.decision import Given, work_per_point
from torchard.sharding.planning.minimum.minimum import improved
from torchard.sharding.planning.plan import Plan, gathered_axes, lost_axes
from torchard.sharding.scheduling.partition import partition
from torchard.sharding.values.mesh import Mesh

__all__ = ["Figures", "improved_plan"]

_FASTER = (1.0, 16.0)  # how many times as long computing takes
_LATENCIES = (0.0, 0.5)  # in the time of the mean collective's bytes
_LITTLE = 1e-3
_MOST = 0.6  # of what another plan sends or computes: where less is gained, plans by rules stay


class Figures(NamedTuple):
    """What a plan costs on each rank.

    Attributes:
        sending: seconds of sending.
        calls: collectives that products wait for, and one for all others: they can be merged.
        work: seconds that the busiest rank computes.
    """

    sending: float
    calls: int
    work: float

    def dominates(self, other: Figures) -> bool:
        """Whether a plan is faster than another on each machine, and much less is sent or computed."""
        if self.sending > _MOST * other.sending and self.work > _MOST * other.work:
            return False
        mean = other.sending / max(other.calls, 1)
        machines = itertools.product(_FASTER, (mean * latency for latency in _LATENCIES))
        return all(self._on(*m) < other._on(*m) * (1 - _LITTLE) for m in machines)

    def _on(self, slower: float, latency: float) -> float:
        return self.sending + self.calls * latency + slower * self.work


def improved_plan(plan: Plan, mesh: Mesh) -> Plan:
    """The plan, or a better one; operations on local values are not planned again.

    Axes that split nothing that is given stay idle. Along axes that split both parameters and the rows of
    a batch, parameters are gathered, however few the rows are.
    """
    free = _split(plan.given) - gathered_axes(plan.given)
    axes = [a for a in mesh.axes if a in free and mesh.shape[a] > 1]
    if plan.given.local or not axes:
        return plan
    decision = improved(plan.graph, plan.given, mesh.sizes, plan.decision, axes)
    if decision is plan.decision:
        return plan
    new = replace(plan, decision=decision)
    known, found = _figures(plan, mesh), _figures(new, mesh)
    decision.bytes, decision.work = found.sending * plan.given.machine.link.bandwidth, found.work
    better = found.dominates(known) and lost_axes(new, mesh) <= lost_axes(plan, mesh)
    return new if better else plan


def _split(given: Given) -> frozenset[str]:
    """The axes that split an input, an output or a constraint."""
    layouts = [known[0] for known in given.inputs.values() if not isinstance(known, int)]
    layouts += [*filter(None, given.outputs), *given.constraints.values()]
    return frozenset(a for layout in layouts for a in layout.split_axes)


def _figures(plan: Plan, mesh: Mesh) -> Figures:
    """What a plan costs; a value that several users read in one layout is moved once."""
    sizes, machine = mesh.sizes, plan.given.machine
    spmd = partition(plan.graph, plan.given, plan.decision, sizes)
    needed, sending, calls, merged = _before_products(spmd), 0.0, 0, 0
    late: set[fx.Node] = set()
    for node in spmd.nodes:
        if any(n in late or is_product(n) for n in node.all_input_nodes):
            late.add(node)
        if STEP.on(node) and (step := STEP.of(node)).collective.sends:
            size = step.elements(sizes) * VAL.of(node).dtype.itemsize * times(node)
            sending += size / machine.link_of(step.axes, step.kind).bandwidth
            if node in late and node in needed:
                calls += times(node)
            else:
                merged = 1
    work = sum(
        option.cost(sizes).work * work_per_point(node, machine)
        for node, option in plan.decision.option.items()
        if not is_alias(node)
    )
    return Figures(sending, calls + merged, work)


def _before_products(graph: fx.Graph) -> set[fx.Node]:
    """The nodes on which a product depends."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in found or is_product(node):
            found.update(node.all_input_nodes)
    return found
