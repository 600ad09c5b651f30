"""What a graph needs once kernels have been put in."""

from __future__ import annotations

import heapq
import operator

import torch
from torch import fx

from torchard.functional.fused import Fused
from torchard.functional.views import is_view

__all__ = ["in_any_layout", "in_order"]

aten = torch.ops.aten


def in_order(graph: fx.Graph) -> None:
    """Put every node after what it reads, and otherwise leave it where it is."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(order[n], n) for n in graph.nodes if not waiting[n]]
    heapq.heapify(ready)
    last: fx.Node | None = None
    while ready:
        _, node = heapq.heappop(ready)
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (order[user], user))


def in_any_layout(graph: fx.Graph) -> None:
    """Let views of kernels' results be reshapes: an implementation may lay them out as it likes."""
    todo = [user for node in graph.nodes if isinstance(node.target, Fused) for user in node.users]
    while todo:
        node = todo.pop()
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        if node.target is operator.getitem or is_view(node):
            todo += node.users
