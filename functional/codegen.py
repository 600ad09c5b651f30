"""A flat graph as one straight-line Python function: no interpreter, no recursion."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals

__all__ = ["compiled"]

_LITERALS = (bool, int, str, type(None))


def compiled(graph: fx.Graph) -> Callable[..., list[torch.Tensor]]:
    """A function from the values of the placeholders to the list of the outputs.

    Every value is dropped after its last use. A list of inputs is emptied for the same reason; a
    tuple is left alone.
    """
    names: dict[str, Any] = {}
    source = _source(graph, names)
    exec(compile(source, "<torchard program>", "exec"), names)
    function: Callable[..., list[torch.Tensor]] = names["program"]
    function.__doc__ = source
    return function


def _source(graph: fx.Graph, names: dict[str, Any]) -> str:
    variables = {node: f"v{i}" for i, node in enumerate(graph.nodes)}
    dead = _dead_after(graph)
    inputs = [variables[node] for node in graph.nodes if node.op == "placeholder"]
    lines = ["def program(args):"]
    if inputs:
        lines.append(f"    {', '.join(inputs)}, = args")
        lines.append("    if type(args) is list: args.clear()")
    unused = [variables[n] for n in graph.nodes if n.op == "placeholder" and not n.users]
    if unused:
        lines.append(f"    del {', '.join(unused)}")
    for node in graph.nodes:
        if node.op == "call_function":
            lines.append(f"    {variables[node]} = {_call(node, variables, names)}")
        elif node.op == "output":
            lines.append(f"    return {_argument(list(node.args[0]), variables, names)}")
        gone = [variables[n] for n in dead.get(node, ())]
        if gone and node.op == "call_function":
            lines.append(f"    del {', '.join(gone)}")
    return "\n".join(lines) + "\n"


def _dead_after(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    order = {node: i for i, node in enumerate(graph.nodes)}
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        last = max(node.users, key=order.__getitem__, default=node)
        if node.users or node.op == "call_function":
            dead.setdefault(last, []).append(node)
    return dead


def _call(node: fx.Node, variables: dict[fx.Node, str], names: dict[str, Any]) -> str:
    arguments = [_argument(value, variables, names) for value in node.args]
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    arguments += [
        f"{key}={_argument(value, variables, names)}" for key, value in node.kwargs.items()
    ]
    return f"{_constant(internals.direct(node.target), names, 'f')}({', '.join(arguments)})"


def _argument(value: Any, variables: dict[fx.Node, str], names: dict[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return variables[value]
    if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = ", ".join(_argument(item, variables, names) for item in value)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if value else ''})"
    if isinstance(value, slice):
        ends = (value.start, value.stop, value.step)
        return f"slice({', '.join(_argument(end, variables, names) for end in ends)})"
    return _constant(value, names, "c")


def _constant(value: Any, names: dict[str, Any], letter: str) -> str:
    key = f"{letter}_{id(value):x}"
    names[key] = value
    return key
