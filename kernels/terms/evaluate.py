"""Evaluation of graphs to terms, node by node.

Programs and patterns are evaluated by the same rules (`normal_forms.py`). Composite operations (norms,
softmax, their backwards) are decomposed by torch's own decompositions; calls of operations without a rule
are opaque: equal only to calls with equal operands.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.core.outputs import tensors_of
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view
from torchard.kernels.terms import normal_forms  # noqa: F401  (registers the rules)
from torchard.kernels.terms.composites import is_composite, taken_apart
from torchard.kernels.terms.registry import Evaluated, EvaluatedCall, rule_of
from torchard.kernels.terms.store import Store
from torchard.kernels.terms.terms import TermValue

__all__ = ["evaluate", "value_of"]


def evaluate(
    graph: fx.Graph,
    inputs: Sequence[TermValue],
    store: Store,
    *,
    sharing: bool = False,
    leaves: Collection[fx.Node] = (),
) -> dict[fx.Node, Evaluated]:
    """The values of all nodes of a graph.

    Args:
        sharing: whether sums with several readers are shared (see `Store`).
        leaves: nodes to treat as unknown values.
    """
    env: dict[fx.Node, Evaluated] = {}
    given = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node in leaves:
            val = VAL.of(node)
            env[node] = store.leaf(node.name, val.shape, val.dtype)
        elif node.op == "call_function":
            env[node] = value_of(store, node, env)
            if sharing:
                _share(store, node, env[node])
    return env


def _share(store: Store, node: fx.Node, result: Evaluated) -> None:
    if isinstance(result, TermValue) and result.term.op == "sum" and _readers(node) > 1:
        store.shared.add(result.term)


def _readers(node: fx.Node) -> int:
    """The number of readers of a node; a composite operation counts as several."""
    return sum(
        _readers(user) if is_view(user) else 1 + is_composite(user.target) for user in node.users
    )


def value_of(store: Store, node: fx.Node, env: dict[fx.Node, Evaluated]) -> Evaluated:
    """The value of one node, given the values of its operands."""
    if node.target is operator.getitem:
        source, place = node.args
        assert isinstance(source, fx.Node)
        return env[source][place]
    call = EvaluatedCall(node, env)
    if not _is_empty(call.val):
        rule = rule_of(node.target)
        result = rule(store, call) if rule else NotImplemented
        if result is NotImplemented and is_composite(node.target):
            result = _composite(store, call)
        if result is NotImplemented and _is_pointwise(call):
            result = store.pointwise(
                _name(node), call.tensors(), call.literals(), call.shape, call.dtype
            )
        if result is not NotImplemented:
            return result
    return _opaque(store, call)


def _is_pointwise(call: EvaluatedCall) -> bool:
    """Whether a call is pointwise with one result (frexp has two)."""
    tags = getattr(call.node.target, "tags", ())
    return torch.Tag.pointwise in tags and isinstance(call.val, torch.Tensor)


def _name(node: fx.Node) -> Hashable:
    """The name of a node's operation."""
    target: Any = node.target
    return target if isinstance(target, Hashable) else repr(target)


def _is_empty(val: Any) -> bool:
    return any(0 in v.shape for v in tensors_of(val))


def _opaque(store: Store, call: EvaluatedCall) -> Evaluated:
    values, literals = call.tensors(), call.literals()
    op = _name(call.node)
    if isinstance(call.val, (tuple, list)):
        return tuple(
            store.opaque(op, values, (literals, i), v.shape, v.dtype)
            if isinstance(v, torch.Tensor)
            else None
            for i, v in enumerate(call.val)
        )
    if not isinstance(call.val, torch.Tensor):
        return call.val
    return store.opaque(op, values, literals, call.shape, call.dtype)


def _composite(store: Store, call: EvaluatedCall) -> Evaluated:
    graph = taken_apart(call.node)
    if graph is None:
        return NotImplemented
    env = evaluate(graph, call.tensors(), store)
    result = [env[n] for n in output_values(graph)]
    if isinstance(call.val, (tuple, list)):
        rest = iter(result)
        return tuple(next(rest) if isinstance(v, torch.Tensor) else None for v in call.val)
    return result[0]

