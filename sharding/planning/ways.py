"""Other ways to compute rows of groups, where a plan has split them.

Rows that are sorted by group may be sorted in blocks, and be computed by the owners of their groups.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx

from torchard.sharding.decompositions.group_owners import Owners, by_owner, products
from torchard.sharding.decompositions.sorted_rows import in_blocks, sorts
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.planning.copies import copy_graph, given_in
from torchard.sharding.planning.decision import Given, Plan
from torchard.sharding.values.mesh import Mesh

__all__ = ["by_owners", "sorted_in_blocks"]


def by_owners(
    graph: fx.Graph, given: Given, plan: Plan, mesh: Mesh
) -> tuple[fx.Graph, Given] | None:
    """A copy of the graph in which rows go to the ranks that have their groups' matrices."""
    owners = {}
    for product, planned in zip(products(graph), products(plan.graph), strict=True):
        rows, matrices = (plan.decision.home[n] for n in planned.all_input_nodes[:2])
        (groups, *inner) = matrices.dims[0]
        count = math.prod(mesh.shape[a] for a in groups.axes)
        if count > 1 and not inner and groups.size % count == 0 and product not in given.local:
            owners[product] = Owners(groups.axes, count, rows.axes_of(0))
    if not owners:
        return None
    copy, env = copy_graph(graph)
    of_copies = {env[product]: known for product, known in owners.items()}
    constraints = by_owner(copy, of_copies, {env[n] for n in given.local})
    given = given_in(given, env, copy)
    return copy, replace(given, relative=given.relative | constraints)


def sorted_in_blocks(
    graph: fx.Graph, given: Given, plan: Plan, mesh: Mesh
) -> tuple[fx.Graph, Given] | None:
    """A copy of the graph in which ranks sort their own rows, where the plan has split them."""
    known = [(sort, plan.decision.home.get(sort.all_input_nodes[0])) for sort in sorts(plan.graph)]
    counts = [1 if home is None else _runs(home, mesh) for _, home in known]
    if max(counts, default=1) == 1 or len(counts) != len(sorts(graph)):
        return None
    blocked, env = copy_graph(graph)
    pairs = zip([env[sort] for sort in sorts(graph)], counts, strict=True)
    if not any([in_blocks(blocked, sort, count) for sort, count in pairs]):
        return None
    return blocked, given_in(given, env, blocked)


def _runs(home: Layout, mesh: Mesh) -> int:
    """The number of runs of adjacent elements that the outermost axes split a list into."""
    return math.prod(mesh.shape[a] for a in home.dims[0][0].axes)
