"""What a traced program goes through before its layouts are chosen.

Creation lets go of the tensor it was modelled on (``zeros_like`` of a sharded value must not move it),
sums from the end are one operation, equal views become one (so that a reshard of their base is shared),
and dead nodes go.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

from torch import fx

from torchard.functional.operators import aten
from torchard.sharding.rules import lookup
from torchard.sharding.rules.scan import fold_flips

__all__ = ["prepare"]

_CONSTANTS: dict[Any, float | int | None] = {
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    aten.empty_like.default: 0,
    aten.new_empty.default: 0,
    aten.full_like.default: None,
    aten.new_full.default: None,
}


def prepare(graph: fx.Graph) -> fx.Graph:
    """The graph, changed in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _CONSTANTS:
            _release(graph, node, _value(node))
        elif _is_empty_cut(node):
            _release(graph, node, 0)
    fold_flips(graph)
    _share_views(graph)
    graph.eliminate_dead_code()
    return graph


def _value(node: fx.Node) -> Any:
    """What a constant is filled with."""
    known = _CONSTANTS[node.target]
    return known if known is not None else node.args[2 if node.target is aten.new_full.default else 1]


def _is_empty_cut(node: fx.Node) -> bool:
    """A slice that keeps nothing, or the gradient of one: for neither need anything be gathered."""
    if node.target is aten.slice.Tensor:
        return 0 in node.meta["val"].shape
    source = node.args[0] if node.target is aten.slice_backward.default else None
    return isinstance(source, fx.Node) and 0 in source.meta["val"].shape


def _release(graph: fx.Graph, node: fx.Node, value: Any) -> None:
    """``zeros_like(x)`` as ``full``: of x it needs only what is known while planning."""
    val = node.meta["val"]
    with graph.inserting_before(node):
        made = graph.call_function(
            aten.full.default,
            (list(val.shape), value),
            {"dtype": val.dtype, "device": val.device},
        )
    made.meta = {k: v for k, v in node.meta.items() if not k.startswith("_")}
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _share_views(graph: fx.Graph) -> None:
    known: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        key = _view_key(node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is not node:
            if "name" in node.meta:
                first.meta.setdefault("name", node.meta["name"])
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _view_key(node: fx.Node) -> Hashable | None:
    if node.op != "call_function" or node.kwargs:
        return None
    rule = lookup(node.target)
    if node.target is not operator.getitem and (rule is None or not rule.alias):
        return None
    return node.target, _frozen(node.args), node.meta.get("recompute")


def _frozen(value: Any) -> Hashable:
    return tuple(map(_frozen, value)) if isinstance(value, (tuple, list)) else value
