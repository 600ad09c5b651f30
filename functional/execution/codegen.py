"""A flat graph as one straight-line Python function: no interpreter, no recursion."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.execution.collecting import Rows, Total, row_of, taken
from torchard.functional.execution.failures import failed
from torchard.functional.execution.loop_code import Lives, assigned, loop_lines
from torchard.functional.execution.profiler_ranges import OpenRanges, paths_of
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.labels import Label
from torchard.functional.programs.loops import is_apart, regrouped
from torchard.functional.programs.markers import item
from torchard.functional.programs.running_sums import in_place
from torchard.functional.programs.tags import LOOP

__all__ = ["Line", "assembled", "compiled", "lines_of", "text_of"]

_LITERALS = (bool, int, str, type(None))

Line = tuple[str, Label | None]


def _direct(node: fx.Node) -> Any:
    return internals.direct(node.target)


def compiled(graph: fx.Graph, name: str = "program") -> Callable[..., list[torch.Tensor]]:
    """A function from the values of the placeholders to the list of the outputs.

    Running sums are computed in place. Every value is dropped after its last use. A list of inputs is
    emptied for the same reason, but not a tuple. An error names the operation that raised it: each line
    is one operation, so the line number in the traceback identifies it, at no cost until something is
    raised. While a profiler is active, another version runs, which marks the program's scopes and
    collectives.

    Args:
        name: the program's name, for messages.
    """
    written = in_place(graph)
    names: dict[str, Any] = {"transforms": internals.has_transforms, "pure": _Pure(graph, name)}
    body = list(lines_of(written or graph, names))
    beginning = ["if transforms(): return pure(args)"] if written else []
    return assembled(body, names, name, beginning)


def assembled(
    body: Sequence[Line], names: dict[str, Any], name: str, beginning: Sequence[str] = ()
) -> Callable[..., list[torch.Tensor]]:
    """A function ``program(args)`` of some lines, with a version for when a profiler is active.

    Args:
        body: its lines, each with the label of its operation.
        names: what the lines refer to.
        name: the program's name, for messages.
        beginning: lines that are run before all others.
    """
    names["profiling"] = internals.profiler_enabled
    names["named"] = _Named(body, names, name)
    first = (*beginning, "if profiling(): return named(args)")
    function, source = _function(first, body, names, name)
    function.__doc__ = source
    return function


class _Pure:
    """The same program without writes, which a transform of torch's cannot run; generated when needed."""

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self.graph, self.name = graph, name

    @functools.cached_property
    def _run(self) -> Callable[..., list[torch.Tensor]]:
        names: dict[str, Any] = {}
        return _function([], list(lines_of(self.graph, names)), names, self.name)[0]

    def __call__(self, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return self._run(args)


class _Named:
    """The same program with profiler ranges, generated when a profiler is first active."""

    def __init__(self, body: Sequence[Line], names: dict[str, Any], name: str) -> None:
        self.body, self.names, self.name = body, names, name
        self.ranged: Callable[..., list[torch.Tensor]] | None = None

    def __call__(self, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.ranged is None:
            self.ranged = self._make()
        return self.ranged(args)

    def _make(self) -> Callable[..., list[torch.Tensor]]:
        paths = paths_of([label for _, label in self.body if label is not None], self.name)
        numbers = {path: i for i, path in enumerate(dict.fromkeys(paths))}
        body: list[Line] = []
        current, upcoming = None, iter(paths)
        depth = 0
        for text, label in self.body:
            indented = len(text) - len(text.lstrip())
            if indented != depth:
                current, depth = None, indented  # iterations are in ranges of their own
            if label is not None and (path := next(upcoming)) != current:
                indent = " " * indented
                body.append((f"{indent}at({numbers[path]}{', i' if indent else ''})", None))
                current = path
            body.append((text, label))
        names = {**self.names, "ranges": functools.partial(OpenRanges, list(numbers))}
        ending = ["    finally:", "        at.close()"]
        return _function(["at = ranges()"], body, names, self.name, ending)[0]


def _function(
    beginning: Sequence[str],
    body: Sequence[Line],
    names: dict[str, Any],
    name: str,
    ending: Sequence[str] = (),
) -> tuple[Callable[..., list[torch.Tensor]], str]:
    """A function of these lines, whose errors name their operation, and its source."""
    lines: list[Line] = [("def program(args):", None)]
    lines += [(f"    {text}", None) for text in (*beginning, "try:")]
    lines += [(f"        {text}", label) for text, label in body]
    # Every error is annotated with its operation, and reraised.
    lines += [("    except Exception as error:", None), ("        failed(error)", None)]
    lines += [(text, None) for text in ("        raise", *ending)]
    labels = [label for _, label in lines]

    def annotate_error(error: Exception) -> None:
        assert error.__traceback__ is not None
        frame = error.__traceback__.tb_frame
        label = labels[error.__traceback__.tb_lineno - 1]
        failed(error, label and label.in_iteration(frame.f_locals.get("i")), name)

    source = "".join(f"{text}\n" for text, _ in lines)
    names["failed"] = annotate_error
    exec(compile(source, "<torchard program>", "exec"), names)
    return names["program"], source


def lines_of(
    graph: fx.Graph,
    names: dict[str, Any],
    function_of: Callable[[fx.Node], Any] = _direct,
    collections: tuple[Any, Any, Any] = (Rows, Total, row_of),
) -> Iterator[Line]:
    """The lines of a graph, each with the label of its operation; adds the names they use.

    Args:
        function_of: what the line of a node calls.
        collections: what collects rows, and sums, of iterations, and reads a row (collecting.py).
    """
    order = regrouped(graph)
    variables = {node: f"v{i}" for i, node in enumerate(order)}
    inputs = [variables[node] for node in order if node.op == "placeholder"]
    if inputs:
        yield f"{', '.join(inputs)}, = args", None
        yield "if type(args) is list: args.clear()", None
    unused = [variables[n] for n in order if n.op == "placeholder" and not n.users]
    if unused:
        yield f"del {', '.join(unused)}", None

    def text(value: Any, variables: Mapping[fx.Node, str] = variables) -> str:
        return _argument(value, variables, names)

    def call(node: fx.Node, variables: Mapping[fx.Node, str] = variables) -> str:
        return _call(node, variables, names, function_of)

    names.update(zip(("Rows", "Total", "row_of"), collections, strict=True), taken=taken)
    lives = Lives(order, variables)
    for loop, nodes in groupby(order, key=LOOP.get):
        if loop is not None:
            yield from loop_lines(loop, list(nodes), lives, text, call)
            continue
        for node in nodes:
            gone = lives.dead_after(node)
            if node.op == "call_function":
                value = lives.collected(node) or call(node)
                operands = text(node.args[0]) if node.args else ""
                yield from assigned(node, value, variables[node], operands, gone)
            elif node.op == "output":
                yield f"return {text(list(output_values(graph)))}", None


def _call(
    node: fx.Node,
    variables: Mapping[fx.Node, str],
    names: dict[str, Any],
    function_of: Callable[[fx.Node], Any],
) -> str:
    arguments = [_argument(value, variables, names) for value in node.args]
    if node.target is item and is_apart(node.all_input_nodes[0]):
        alike = [user for user in node.all_input_nodes[0].users if user.args == node.args]
        if len(alike) == 1:
            return f"taken({', '.join(arguments)})"
    if node.target is operator.getitem or (node.target is item and is_apart(node.all_input_nodes[0])):
        return f"{arguments[0]}[{arguments[1]}]"
    if node.target is item:
        return f"row_of({', '.join(arguments)})"
    if is_apart(node):
        return arguments[0]
    arguments += [
        f"{key}={_argument(value, variables, names)}" for key, value in node.kwargs.items()
    ]
    return f"{_constant(function_of(node), names, 'f')}({', '.join(arguments)})"


def _argument(value: Any, variables: Mapping[fx.Node, str], names: dict[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return variables[value]
    return text_of(value, lambda inner: _argument(inner, variables, names), names)


def text_of(value: Any, inner: Callable[[Any], str], names: dict[str, Any]) -> str:
    """The text of an argument that is no value of the program; adds the names that it uses.

    Args:
        inner: the text of an item of a list or tuple.
    """
    if type(value) in _LITERALS or (type(value) is float and math.isfinite(value)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(inner, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if value else ''})"
    return _constant(value, names, "c")


def _constant(value: Any, names: dict[str, Any], letter: str) -> str:
    key = f"{letter}_{id(value):x}"
    names[key] = value
    return key
