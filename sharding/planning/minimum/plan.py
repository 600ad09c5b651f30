"""The plan of a program on a given machine: the minimum over its layouts, and over ways to write it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from torchard.sharding.planning.copies import copy_graph, given_in
from torchard.sharding.planning.decision import Given, Plan
from torchard.sharding.planning.manual_options import local_operations
from torchard.sharding.planning.minimum.alternatives import settled, with_alternatives
from torchard.sharding.planning.minimum.minimum import minimized
from torchard.sharding.planning.minimum.whole import all_whole
from torchard.sharding.planning.ways import by_owners, sorted_in_blocks
from torchard.sharding.values.mesh import Mesh

__all__ = ["planned"]


def planned(graph: fx.Graph, given: Given, mesh: Mesh) -> Plan:
    """The fastest plan found of a program, or of one that computes rows of groups in another way."""
    axes = given.planned_axes(mesh.sizes)
    if not axes:
        return Plan(graph, given, all_whole(graph, given, mesh.sizes))
    ways = [(graph, given, *_minimum(graph, given, axes, mesh))]
    if blocked := sorted_in_blocks(graph, given, ways[0][2], mesh):
        ways.append((*blocked, *_minimum(*blocked, axes, mesh)))
    plans = [(seconds, plan) for *_, plan, seconds in ways]
    for known, kept, plan, _ in ways:
        if owned := by_owners(known, kept, plan, mesh):
            plan, seconds = _minimum(*owned, axes, mesh)
            plans.append((seconds, plan))
    return min(plans, key=lambda found: found[0])[1]


def _minimum(
    graph: fx.Graph, given: Given, axes: Sequence[str], mesh: Mesh
) -> tuple[Plan, float]:
    """The minimum in which each operation that comes apart is whole or apart, and its seconds."""
    graph, env = copy_graph(graph)
    given = given_in(given, env, graph)
    alternatives = with_alternatives(graph, given, mesh.sizes, axes)
    if given.local:
        given.local.update(local_operations(graph))
    start = all_whole(graph, given, mesh.sizes)
    found = minimized(graph, given, mesh.sizes, start, axes, alternatives)
    return Plan(graph, given, settled(graph, found.decision, alternatives)), found.seconds
