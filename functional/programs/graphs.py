"""Helpers for passes over fx graphs."""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.tagging import Same, forget, inherit, stand_for
from torchard.functional.programs.tags import LOOP, VAL

__all__ = [
    "Inserter",
    "add_call",
    "bytes_of",
    "computation",
    "extracted",
    "frozen",
    "output_node",
    "output_values",
    "substitute",
    "with_operands",
    "without_garbage",
]


_RARELY = 200_000  # new objects, after which Python looks for garbage among them


@contextlib.contextmanager
def without_garbage() -> Iterator[None]:
    """A context that makes graphs, in which Python rarely looks for garbage.

    Graphs are many small objects that live on. Looking through all of them again and again took a quarter
    of the time of traces and plans. The collector remains on, since that is for the user and for other
    threads to decide; a threshold that they set meanwhile remains, too.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _RARELY:
        gc.set_threshold(_RARELY, *before[1:])
    try:
        yield
    finally:
        if gc.get_threshold() == (_RARELY, *before[1:]):
            gc.set_threshold(*before)


def add_call(
    like: fx.Node,
    target: Any,
    *args: Any,
    graph: fx.Graph | None = None,
    val: Any = None,
    same: Same = "place",
    **kwargs: Any,
) -> fx.Node:
    """Add a call at the graph's insertion point, with a value and with tags inherited from a node.

    Args:
        like: the node whose tags the call inherits.
        graph: the graph to which the call is added; the graph of ``like`` if omitted.
        val: the call's value; if omitted, ``target`` is run on the values of its operands.
        same: what both nodes have in common (`inherit`). A value that is inherited is not computed.
    """
    call = (graph or like.graph).call_function(target, args, kwargs)
    if val is None and same == "place":
        values, named = fx.map_arg((args, kwargs), VAL.of)
        with internals.no_modes(), torch.no_grad():
            val = target(*values, **named)
    inherit(call, like, same)
    if val is not None:
        VAL.set(call, val)
    return call


def frozen(value: Any) -> Hashable:
    """Arguments of a call as a key, equal for equal ones; what cannot be hashed equals itself alone."""
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, Mapping):
        return tuple((key, frozen(value[key])) for key in sorted(value))
    # 1, 1.0 and True are equal, but not the same number
    return type(value), value if isinstance(value, Hashable) else id(value)


class Inserter:
    """Inserts calls before a node, with tags inherited from it: ``insert(target, *args, **kwargs)``."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call; see `add_call`."""
        with self.node.graph.inserting_before(self.node):
            return add_call(self.node, target, *args, **kwargs)

    def outputs_of(self, target: Any, *args: Any) -> list[fx.Node]:
        """Insert a call with several results; returns its items."""
        call = self(target, *args)
        return [self(operator.getitem, call, i) for i in range(len(VAL.of(call)))]


def substitute(node: fx.Node, new: fx.Node) -> None:
    """Replace a node by another one with the same value, which keeps the labels of both, and erase it."""
    stand_for(new, node)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def with_operands(node: fx.Node, operands: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The args and kwargs of a call with its operands replaced by these, in order."""
    given = iter(operands)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(given))
    return args, kwargs


def computation(nodes: Sequence[fx.Node], operands: Iterable[fx.Node]) -> tuple[Hashable, ...]:
    """The calls of some nodes, in order, on numbered operands and results: equal for equal ones."""
    numbers = {node: i for i, node in enumerate((*operands, *nodes))}

    def line(node: fx.Node) -> Hashable:
        given = fx.map_arg((node.args, node.kwargs), lambda operand: f"%{numbers[operand]}")
        return node.target, repr(given)

    return tuple(map(line, nodes))


def extracted(
    graph: fx.Graph,
    nodes: Iterable[fx.Node],
    operands: Iterable[fx.Node],
    results: Iterable[fx.Node],
) -> fx.Graph:
    """Copy some nodes, in order and without their loops, to a new graph, from operands to results."""
    env = {node: graph.placeholder(f"in{i}") for i, node in enumerate(operands)}
    for node, placeholder in env.items():
        if VAL.on(node):
            VAL.set(placeholder, VAL.of(node))
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
        forget(env[node], LOOP)
    graph.output(tuple(env[node] for node in results))
    return graph


def output_node(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    node: fx.Node = next(n for n in reversed(graph.nodes) if n.op == "output")
    return node


def output_values(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The nodes that a graph returns."""
    values: Any = output_node(graph).args[0]
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def bytes_of(node: fx.Node, item: int = 0) -> int:
    """The bytes of a node's value, or of one item of a tuple; for an input, those of its storage."""
    val: Any = VAL.get(node)
    if isinstance(val, (tuple, list)):
        val = val[item]
    if not isinstance(val, torch.Tensor):
        return 0
    if node.op == "placeholder":  # a view may be larger or smaller than its storage
        return val.untyped_storage().nbytes()
    reach = sum((n - 1) * stride for n, stride in zip(val.shape, val.stride(), strict=True)) + 1
    return max(val.numel(), reach if val.numel() else 0) * val.element_size()  # with gaps
