"""The order of a rolled graph in which the operations of each loop follow one another."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import Any

from torch import fx

from torchard.functional.loops.markers import LOOP

__all__ = ["regrouped"]


def regrouped(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph, those of a loop together; otherwise in the graph's order, if it can be kept.

    Passes add operations where they are needed: what a loop reads may stand inside of it.
    """
    nodes = list(graph.nodes)
    if not any(LOOP.on(node) for node in nodes):
        return nodes
    groups: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(LOOP.get(node) or node, []).append(node)
    of = {node: key for key, members in groups.items() for node in members}
    sorter = TopologicalSorter(
        {key: {of[n] for n in _operands(members)} - {key} for key, members in groups.items()}
    )
    sorter.prepare()
    keys = list(groups)
    place = {key: i for i, key in enumerate(keys)}
    ready, order = [place[key] for key in sorter.get_ready()], list[fx.Node]()
    heapify(ready)
    while ready:
        key = keys[heappop(ready)]
        order += groups[key]
        sorter.done(key)
        for freed in sorter.get_ready():
            heappush(ready, place[freed])
    return order


def _operands(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [operand for node in nodes for operand in node.all_input_nodes]
