"""A flat graph as one straight-line Python function: no interpreter, no recursion."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.failures import failed
from torchard.functional.labels import Label, label_of

__all__ = ["compiled"]

_LITERALS = (bool, int, str, type(None))

Line = tuple[str, Label | None]


def compiled(graph: fx.Graph, name: str = "program") -> Callable[..., list[torch.Tensor]]:
    """A function from the values of the placeholders to the list of the outputs.

    Every value is dropped after its last use. A list of inputs is emptied for the same reason; a
    tuple is left alone. What an operation raises says which it was: a line is one operation, so the
    line of the traceback tells, and nothing is done for it before something is raised.

    Args:
        name: of the program, for messages.
    """
    names: dict[str, Any] = {}
    return _function(list(_body(graph, names)), names, name)


def _function(
    body: Sequence[Line], names: dict[str, Any], name: str
) -> Callable[..., list[torch.Tensor]]:
    lines: list[Line] = [("def program(args):", None), ("    try:", None)]
    lines += [(f"        {text}", label) for text, label in body]
    lines += [
        ("    except Exception as error:", None),
        ("        failed(error)", None),
        ("        raise", None),
    ]
    labels = [label for _, label in lines]

    def told(error: Exception) -> None:
        assert error.__traceback__ is not None
        failed(error, labels[error.__traceback__.tb_lineno - 1], name)

    source = "".join(f"{text}\n" for text, _ in lines)
    room = {**names, "failed": told}
    exec(compile(source, "<torchard program>", "exec"), room)
    function: Callable[..., list[torch.Tensor]] = room["program"]
    function.__doc__ = source
    return function


def _body(graph: fx.Graph, names: dict[str, Any]) -> Iterator[Line]:
    """The lines of a graph, each with the label of its operation; fills the names they use."""
    variables = {node: f"v{i}" for i, node in enumerate(graph.nodes)}
    dead = _dead_after(graph)
    inputs = [variables[node] for node in graph.nodes if node.op == "placeholder"]
    if inputs:
        yield f"{', '.join(inputs)}, = args", None
        yield "if type(args) is list: args.clear()", None
    unused = [variables[n] for n in graph.nodes if n.op == "placeholder" and not n.users]
    if unused:
        yield f"del {', '.join(unused)}", None
    for node in graph.nodes:
        if node.op == "call_function":
            yield f"{variables[node]} = {_call(node, variables, names)}", label_of(node)
        elif node.op == "output":
            yield f"return {_argument(list(node.args[0]), variables, names)}", None
        gone = [variables[n] for n in dead.get(node, ())]
        if gone and node.op == "call_function":
            yield f"del {', '.join(gone)}", None


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
