"""A plan, or the minimum along its axes (`planning/minimum/`) if that is better on any machine.

A plan may send less by more collectives, or by computing more. So a plan replaces another one if it takes
as many collectives or fewer, and less time on a machine that computes fast and on one that does not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import fx

from torchard.functional.costs.flops import is_product
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import COLLECTIVE
from torchard.sharding.planning.decision import seconds_per_point
from torchard.sharding.planning.minimum.minimum import improved
from torchard.sharding.planning.plan import Plan, gathered_axes, lost_axes
from torchard.sharding.scheduling.partition import partition
from torchard.sharding.values.mesh import Mesh

__all__ = ["Figures", "improved_plan"]

_SLOWER = (1.0, 16.0)  # how many times as long computing takes
_MOST = 0.6  # of what another plan sends or computes: where less is gained, plans by rules stay


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

    def dominates(self, other: Figures) -> bool:
        """Whether a plan is faster than another on each machine, and much less is sent or computed."""
        if self.sending > _MOST * other.sending and self.work > _MOST * other.work:
            return False
        return self.calls <= other.calls and all(
            self.sending + slower * self.work < other.sending + slower * other.work
            for slower in _SLOWER
        )


def improved_plan(plan: Plan, mesh: Mesh) -> tuple[Plan, fx.Graph]:
    """The plan, or a better one, and its SPMD graph; operations on local values are not planned again.

    Axes that split nothing that is given stay idle. Along axes that split both parameters and the rows of
    a batch, parameters are gathered, however few the rows are.
    """
    spmd = _partitioned(plan, mesh)
    free = plan.given.split_axes - gathered_axes(plan.given)
    axes = [a for a in mesh.axes if a in free and mesh.shape[a] > 1]
    if plan.given.local or not axes:
        return plan, spmd
    decision = improved(plan.graph, plan.given, mesh.sizes, plan.decision, axes)
    if decision is plan.decision:
        return plan, spmd
    new = replace(plan, decision=decision)
    new_spmd = _partitioned(new, mesh)
    known, found = _figures(plan, spmd, mesh), _figures(new, new_spmd, mesh)
    decision.bytes, decision.work = found.sending * plan.given.machine.link.bandwidth, found.work
    better = found.dominates(known) and lost_axes(new, mesh) <= lost_axes(plan, mesh)
    return (new, new_spmd) if better else (plan, spmd)


def _partitioned(plan: Plan, mesh: Mesh) -> fx.Graph:
    return partition(plan.graph, plan.given, plan.decision, mesh.sizes)


def _figures(plan: Plan, spmd: fx.Graph, mesh: Mesh) -> Figures:
    """What a plan costs; a value that several users read in one layout is moved once."""
    machine = plan.given.machine
    needed, late, waits = _before_products(spmd), set[fx.Node](), dict[fx.Node, int]()
    sending, alone, together = 0.0, 0, set[object]()
    for node in spmd.nodes:
        if any(n in late or is_product(n) for n in node.all_input_nodes):
            late.add(node)
        waits[node] = max((waits[n] for n in node.all_input_nodes), default=0)
        if COLLECTIVE.on(node):
            sent = COLLECTIVE.of(node)
            sending += sent.bytes * times(node) / machine.link_of(sent.axes, sent.kind).bandwidth
            waits[node] += 1
            if node in late and node in needed:
                alone += times(node)
            else:
                together.add((waits[node], sent.kind, sent.axes))
    work = sum(
        option.cost(mesh.sizes).work * seconds_per_point(node, machine)
        for node, option in plan.decision.option.items()
    )
    return Figures(sending, alone + len(together), work)


def _before_products(graph: fx.Graph) -> set[fx.Node]:
    """The nodes on which a product depends."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in found or is_product(node):
            found.update(node.all_input_nodes)
    return found
