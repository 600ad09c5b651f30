"""Instructions as one straight-line Python function: no interpreter, no recursion."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.checks.looks import Examined, indices_of, is_unset
from torchard.functional.effects.in_place import WRITTEN_VIEWS
from torchard.functional.execution.choices import outlined
from torchard.functional.execution.donated import Owned
from torchard.functional.execution.failures import failed
from torchard.functional.execution.instructions import (
    Assign,
    Compute,
    Copied,
    Drop,
    For,
    Get,
    Inputs,
    Instruction,
    New,
    Pack,
    Put,
    Read,
    Return,
    Shifted,
    SlotNames,
    When,
    While,
    Write,
)
from torchard.functional.execution.native_loops import InNativeCode, in_native_code
from torchard.functional.execution.profiler_ranges import OpenRanges, paths_of
from torchard.functional.execution.sequencing import instructions_of, what_runs
from torchard.functional.iterations.collecting import Rows, Total, copied, taken
from torchard.functional.programs.calls import callee
from torchard.functional.programs.labels import Label
from torchard.functional.programs.loops import regrouped
from torchard.functional.programs.tags import CHECKS, STAGE
from torchard.functional.torch_internals.operators import aten

__all__ = ["Line", "assembled", "compiled", "text_of"]

_LITERALS = (bool, int, str, type(None))
# The names to which the text of instructions refers.
_COLLECTING = {"copied": copied, "Rows": Rows, "Total": Total, "taken": taken}


class Line(NamedTuple):
    """A line of a program, the label of its operation, and how many loops and conditions it is in."""

    text: str
    label: Label | None = None
    depth: int = 0

    @property
    def indented(self) -> str:
        """The text, as deep as it is."""
        return "    " * self.depth + self.text


def compiled(
    graph: fx.Graph, name: str = "program", donated: Sequence[int] = ()
) -> Callable[..., list[torch.Tensor]]:
    """A function from the values of the placeholders to the list of the outputs.

    Running sums, and writes to what is dead afterwards, are made in place. Every value is dropped after
    its last use. A list of inputs is emptied for the same reason, but not a tuple. An error names the
    operation that raised it: each line is one operation, so the line number in the traceback identifies
    it, at no cost until something is raised. While a profiler is active, another version runs, which
    marks the program's scopes and collectives.

    Args:
        name: the program's name, for messages.
        donated: the positions of inputs whose memory the call may take.
    """
    graph = outlined(graph, lambda block: compiled(block, name)) or graph
    summed, runs = what_runs(graph, donated)
    names = dict(_COLLECTING)
    body = list(lines_of(runs.instructions, names))
    beginning: list[str] = []
    if runs.writes or summed is not graph:
        names |= {"owned": Owned(runs.taken), "pure": _Pure(graph, name)}
        beginning = ["own = owned(args)", "if own is None: return pure(args)", "args = own", "del own"]
    return assembled(body, names, name, beginning)


def assembled(
    body: Sequence[Line], names: dict[str, Any], name: str, beginning: Sequence[str] = ()
) -> Callable[..., list[torch.Tensor]]:
    """A function ``program(args)`` with these lines, and a second version for an active profiler.

    Args:
        body: the function's lines, each with the label of its operation.
        names: the objects to which the lines refer, by name.
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
        names = dict(_COLLECTING)
        body = list(lines_of(instructions_of(regrouped(self.graph)), names))
        return _function([], body, names, self.name)[0]

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
        paths = paths_of([line.label for line in self.body if line.label is not None], self.name)
        numbers = {path: i for i, path in enumerate(dict.fromkeys(paths))}
        body: list[Line] = []
        current, upcoming = None, iter(paths)
        depth = 0
        for line in self.body:
            if line.depth != depth:
                current, depth = None, line.depth  # iterations are in ranges of their own
            if line.label is not None and (path := next(upcoming)) != current:
                body.append(Line(f"at({numbers[path]}{', i' if depth else ''})", None, depth))
                current = path
            body.append(line)
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
    lines = [Line("def program(args):"), *(Line(text, None, 1) for text in (*beginning, "try:"))]
    lines += [line._replace(depth=line.depth + 2) for line in body]
    # Every error is annotated with its operation, and reraised.
    lines += [Line("except Exception as error:", None, 1), Line("failed(error)", None, 2)]
    lines += [Line("raise", None, 2), *map(Line, ending)]
    labels = [line.label for line in lines]

    def annotate_error(error: Exception) -> None:
        assert error.__traceback__ is not None
        frame = error.__traceback__.tb_frame
        label = labels[error.__traceback__.tb_lineno - 1]
        failed(error, label, name, frame.f_locals.get("i"))

    source = "".join(f"{line.indented}\n" for line in lines)
    names["failed"] = annotate_error
    exec(compile(source, "<torchard program>", "exec"), names)
    return names["program"], source


def lines_of(
    instructions: Sequence[Instruction], names: dict[str, Any], depth: int = 0
) -> Iterator[Line]:
    """The lines of instructions, each with the label of its operation; adds the names they use."""
    for each in instructions:
        match each:
            case For() | While():
                native = in_native_code(each)
                if native is not None:
                    yield from _native(native, names, depth)
                yield from _loop(each, names, depth + (native is not None))
                if native is not None:
                    yield Line("else:", None, depth)
                    yield Line(f"{_comma(native.results)} = ran", None, depth + 1)
                    yield Line("del ran", None, depth)
            case When(rows, body):
                yield Line(f"if {rows.start} <= i < {rows.stop}:", None, depth)
                yield from lines_of(body, names, depth + 1)
            case Shifted(by, body):
                yield Line(f"i += {by}", None, depth)
                yield from lines_of(body, names, depth)
                yield Line(f"i -= {by}", None, depth)
            case _:
                texts = _texts(each, names)
                if isinstance(each, (Compute, Write, Get)) and each.node and CHECKS.on(each.node):
                    texts = _checked(each, texts, names)
                yield from (Line(text, each.label, depth) for text in texts)


def _loop(loop: For | While, names: dict[str, Any], depth: int) -> Iterator[Line]:
    """The lines of a loop in Python."""
    if isinstance(loop, For):
        order = loop.order
        yield Line(f"for i in range({order.start}, {order.stop}, {order.step}):", None, depth)
        yield from lines_of(loop.body, names, depth + 1)
    else:
        yield Line("i = 0", None, depth)
        yield Line(f"while bool({loop.slot}):", None, depth)
        yield from lines_of(loop.body, names, depth + 1)
        yield Line("i += 1", None, depth + 1)


def _native(found: InNativeCode, names: dict[str, Any], depth: int) -> Iterator[Line]:
    """The lines before a loop in Python, which runs if native code did not."""
    function = _constant(found.loop, names, "n")
    given = (f"[{', '.join(x)}]" for x in (found.sources, found.carries, found.collectors))
    yield Line(f"ran = {function}({', '.join(given)})", None, depth)
    yield Line("if ran is None:", None, depth)


def _comma(slots: Sequence[str]) -> str:
    return f"{', '.join(slots)}," if slots else "[]"


def _checked(
    instruction: Compute | Write | Get, texts: Iterable[str], names: dict[str, Any]
) -> Iterator[str]:
    """The text of an instruction, and of looks at its indices and at its result."""
    node = instruction.node
    assert node is not None
    slots = {} if isinstance(instruction, Get) else instruction.slots
    for operand, within in indices_of(node) if CHECKS.of(node).index else ():
        yield f"{_constant(within, names, 'x')}({slots[operand]})"
    yield from texts
    if STAGE.get(node) in (None, "wait") and not is_unset(node):  # what was issued is not there yet
        given = isinstance(instruction, Compute) and instruction.given  # then the call has taken them
        operands = [] if given else [slots[x] for x in node.all_input_nodes if x in slots]
        look = _constant(Examined(node), names, "x")
        yield f"{look}({instruction.slot}, [{', '.join(operands)}])"


def _texts(instruction: Instruction, names: dict[str, Any]) -> Iterator[str]:
    """The text of one instruction that has no body."""
    match instruction:
        case Inputs(slots):
            if slots:
                yield f"{', '.join(slots)}, = args"
                yield "if type(args) is list: args.clear()"
        case Copied(node, slot, slots):
            base, source, *place = _arguments(node, slots, names)
            yield f"{slot} = copied({base})"
            yield _written(WRITTEN_VIEWS[node.target], aten.copy_.default, slot, source, place, names)
        case Compute(node, slot, slots, given, placed):
            arguments = [given] if given else _arguments(node, slots, names)
            arguments += [repr(tuple(placed))] if placed else []
            function = _constant(callee(node.target), names, "f")
            yield f"{slot} = {function}({', '.join(arguments)})"
        case Write(node, slot, slots, write, part):
            base, *others = _arguments(node, slots, names)
            if part is None:
                function = _constant(internals.direct(write), names, "f")
                yield f"{function}({', '.join([base, *others])})"
            else:
                source, *place = others
                yield _written(part, write, base, source, place, names)
            yield f"{slot} = {base}"
        case Pack(_, slot, values, slots):
            yield f"{slot} = {_argument(list(values), slots, names)}"
        case Read(_, slot, source, index, how):
            at = "i" if index is None else index
            yield f"{slot} = taken({source}, {at})" if how == "out" else f"{slot} = {source}[{at}]"
        case New(slot, kind, count):
            empty = {"list": f"[None] * {count}", "rows": f"Rows({count})", "total": "Total()"}
            yield f"{slot} = {empty[kind]}"
        case Put(_, slot, source, listed, only):
            within = f"if i in {tuple(only)}: " if only else ""
            yield within + (f"{slot}[i] = {source}" if listed else f"{slot}.put(i, {source})")
        case Get(_, slot, source):
            yield f"{slot} = {source}.get()"
        case Assign(_, slots, sources):
            comma = "," if len(slots) > 1 else ""
            yield f"{', '.join(slots)}{comma} = {', '.join(sources)}{comma}"
        case Drop(slots):
            yield f"del {', '.join(slots)}"
        case Return(values, slots, alone):
            results = [_argument(value, slots, names) for value in values]
            for i in alone:
                results[i] = f"{_constant(internals.without_base, names, 'f')}({results[i]})"
            yield f"return [{', '.join(results)}]"


def _written(
    view: Any, write: Any, base: str, source: str, place: Sequence[str], names: dict[str, Any]
) -> str:
    """The text of a write to a part of a base."""
    part, function = (_constant(internals.direct(each), names, "f") for each in (view, write))
    return f"{function}({part}({', '.join([base, *place])}), {source})"


def _arguments(node: fx.Node, slots: SlotNames, names: dict[str, Any]) -> list[str]:
    named = [f"{key}={_argument(x, slots, names)}" for key, x in node.kwargs.items()]
    return [_argument(x, slots, names) for x in node.args] + named


def _argument(value: Any, slots: SlotNames, names: dict[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return slots[value]
    return text_of(value, lambda inner: _argument(inner, slots, names), names)


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
