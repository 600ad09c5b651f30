"""Reading and editing graphs: what any pass over an fx graph needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional.programs.tags import VAL

__all__ = ["bytes_of", "output_node", "output_values", "sweep"]


def output_node(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    node: fx.Node = next(n for n in reversed(graph.nodes) if n.op == "output")
    return node


def output_values(graph: fx.Graph) -> tuple[Any, ...]:
    """What the graph returns."""
    values = output_node(graph).args[0]
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def sweep(graph: fx.Graph) -> None:
    """Dead code elimination: on a pure graph, whatever nobody uses."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def bytes_of(node: fx.Node, item: int = 0) -> int:
    """The bytes of a node's value, or of one result of several; those of its storage for an input."""
    val: Any = VAL.get(node)
    if isinstance(val, (tuple, list)):
        val = val[item]
    if not isinstance(val, torch.Tensor):
        return 0
    if node.op == "placeholder":  # may be a view of more, or of less
        return val.untyped_storage().nbytes()
    return val.numel() * val.element_size()
