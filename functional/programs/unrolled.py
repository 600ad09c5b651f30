"""The unrolled form of a rolled program: every iteration of its loops, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import fx

from torchard.functional.core.scope_frames import Frame, in_iteration, path_of
from torchard.functional.programs.loops import carried, is_apart, issued_ahead, regrouped
from torchard.functional.programs.markers import (
    Iteration,
    Loop,
    again,
    enter,
    item,
    leave,
    listed,
    row,
    rows,
    tells_apart,
    total,
)
from torchard.functional.programs.program import Pass, Program, Stage
from torchard.functional.programs.records import PerIteration
from torchard.functional.programs.tagging import forget, inherit, own_tags
from torchard.functional.programs.tags import (
    FRAMES,
    ITERATION,
    LOOP,
    ORIGIN,
    SCOPE,
    SEGMENTS,
    SOURCE,
    WHY,
)
from torchard.functional.torch_internals.operators import aten

__all__ = ["applied", "has_loops", "pattern_pass", "unrolled", "unrolled_for"]


def has_loops(program: Program) -> bool:
    """Whether a program is a rolled one."""
    return any(LOOP.on(node) for node in program.graph.nodes)


def unrolled(program: Program) -> Program:
    """The program without loops; one that has none is returned as it is."""
    if not has_loops(program):
        return program
    return replace(program, graph=_Unrolled(program.graph).run())


@dataclass
class _Unrolled:
    old: fx.Graph
    new: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # For each node in a loop, its value in the iteration of each row.
    each: dict[fx.Node, dict[int, fx.Node]] = field(default_factory=dict)
    iterations: dict[fx.Node, Iteration] = field(default_factory=dict)
    frames: dict[tuple[Frame, int], Frame] = field(default_factory=dict)
    origins: dict[tuple[int, int], int] = field(default_factory=dict)
    told: dict[tuple[Any, int], Any] = field(default_factory=dict)
    numbers: int = 0

    def run(self) -> fx.Graph:
        self.numbers = max((ORIGIN.get(node, 0) for node in self.old.nodes), default=0)
        for loop, nodes in groupby(regrouped(self.old), key=LOOP.get):
            if loop is None:
                for node in nodes:
                    if not is_apart(node):
                        self.env[node] = self._after(node)
            else:
                self._iterations(loop, list(nodes))
        return self.new

    def _iterations(self, loop: Loop, nodes: list[fx.Node]) -> None:
        first = len(self.each)
        self.each.update((node, {}) for node in nodes)
        for k, node in enumerate(nodes, first):
            self.iterations[node] = Iteration(k, SCOPE.get(node, ""), loop.count)
        entered: dict[fx.Node, fx.Node] = {}
        ahead, distance = issued_ahead(nodes)
        order = loop.order()
        for turn, i in enumerate(order):
            handed: dict[fx.Node, fx.Node] = {}
            for node in nodes:
                if i in self.each[node]:
                    pass  # issued ahead
                elif node.target is enter:
                    self.each[node][i] = entered.get(node) or self._entering(node, i)
                elif node.target is again:
                    value, enters = carried(node)
                    self.each[node][i] = handed[enters] = self._at(value, i)
                else:
                    self.each[node][i] = self._iteration(node, i)
                if ahead and node is ahead[-1]:
                    upcoming = order[turn + distance : turn + distance + 1] if turn else order[1:]
                    self._issue(ahead, upcoming[:distance])
            entered = handed

    def _issue(self, nodes: Sequence[fx.Node], rows: Iterable[int]) -> None:
        """The operations that are issued ahead, for some rows."""
        for i in rows:
            for node in nodes:
                if i not in self.each[node]:
                    self.each[node][i] = self._iteration(node, i)

    def _entering(self, node: fx.Node, i: int) -> fx.Node:
        """The value that enters the first iteration."""
        value = self._at(node.args[0], i)
        if WHY.on(node) and not SEGMENTS.get(value):
            WHY.setdefault(value, WHY.of(node).in_iteration(i))
        return value

    def _at(self, node: Any, i: int) -> fx.Node:
        """The value that the iteration of a row reads."""
        return self.each[node][i] if node in self.each else self.env[node]

    def _iteration(self, node: fx.Node, i: int) -> fx.Node:
        if node.target is row:
            stacked: Any = node.args[0]
            if stacked.target is listed:
                return self._at(stacked.args[0][i], i)
            made = self.new.call_function(aten.select.int, (self._at(stacked, i), 0, i))
            inherit(made, node, "value")
        else:
            made = self.new.node_copy(node, lambda operand: self._at(operand, i))
        self._tag(made, i, LOOP.of(node).outside)
        ITERATION.set(made, self.iterations[node])
        return made

    def _tag(self, node: fx.Node, i: int, outside: int) -> None:
        """The tags that tell iterations apart: the number in a scope's name, frames, origins.

        Args:
            outside: how many frames the loop is in.
        """
        forget(node, LOOP)
        if frames := FRAMES.get(node, ()):
            FRAMES.set(node, self._frames(frames, i, outside))
            SCOPE.set(node, path_of(FRAMES.of(node)))
        if segments := SEGMENTS.get(node, ()):
            SEGMENTS.set(
                node, tuple(replace(s, frames=self._frames(s.frames, i, outside)) for s in segments)
            )
        for tag, value in own_tags(node).items():
            if isinstance(value, PerIteration):
                tag.set(node, self._in_iteration(value, i))
        if ORIGIN.on(node):
            known = ORIGIN.of(node), i
            if known not in self.origins:
                self.numbers += 1
                self.origins[known] = self.numbers
            ORIGIN.set(node, self.origins[known])

    def _in_iteration(self, value: PerIteration, i: int) -> Any:
        """What a tag says of one iteration: one object for all nodes that share the tag's."""
        if (value, i) not in self.told:
            self.told[value, i] = value.in_iteration(i)
        return self.told[value, i]

    def _frames(self, frames: tuple[Frame, ...], i: int, outside: int) -> tuple[Frame, ...]:
        """The frames of one iteration: those from the loop's own on are entered once in each."""
        if any(frame.each for frame in frames):
            return tuple(frame.each[i] if frame.each else frame for frame in frames)
        own = ((k, frame) for k, frame in enumerate(frames) if k >= outside)
        start = next((k for k, frame in own if frame.iterated), len(frames))
        return (*frames[:start], *(self._frame(frame, i) for frame in frames[start:]))

    def _frame(self, frame: Frame, i: int) -> Frame:
        if (frame, i) not in self.frames:
            name = in_iteration(frame.name, i) if frame.iterated else frame.name
            self.frames[frame, i] = replace(frame, name=name, iterated=False)
        return self.frames[frame, i]

    # -- after a loop -----------------------------------------------------------------------------

    def _after(self, node: fx.Node) -> fx.Node:
        source: Any = node.args[0] if node.args else None
        if node.target is leave:
            return self._values(source)[-1]
        if node.target is rows:
            values = {i: self.each[n][i] for n in node.all_input_nodes for i in LOOP.of(n).span}
            return self._call(node, aten.stack.default, [values[i] for i in range(len(values))])
        if node.target is listed:
            return self._call(node, aten.stack.default, [self.env[value] for value in source])
        if node.target is item:
            index: Any = node.args[1]
            if source not in self.env:
                return next(self.each[n][index] for n in source.all_input_nodes if index in self.each[n])
            return self._call(node, aten.select.int, self.env[source], 0, index)
        if node.target is total:
            first, *others = (value for each in node.all_input_nodes for value in self._values(each))
            for other in others:
                first = self._call(node, aten.add.Tensor, first, other)
            return first
        return self.new.node_copy(node, self.env.__getitem__)

    def _values(self, node: fx.Node) -> list[fx.Node]:
        """The values of a loop's node in the order in which its iterations ran."""
        return [self.each[node][i] for i in LOOP.of(node).order()]

    def _call(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        made = self.new.call_function(target, args)
        inherit(made, node, "value")
        return made


def pattern_pass(
    stage: Stage, run: Callable[[Program], Program], patterns: Mapping[str, Any], what: str
) -> Pass:
    """A pass that reads loops unless one of its patterns over scopes may tell their iterations apart.

    Args:
        patterns: the patterns, by the text that the user wrote.
        what: the effect of a pattern on layers, for the message.
    """
    for written, pattern in patterns.items():
        if tells_apart([pattern]):
            text = pattern if isinstance(pattern, str) else "block/*"
            together = re.sub(r"\[[^]]*\]?|\d+|\?", "*", text)
            remedy = (
                f"{written} may select some iterations and not others: if all of them may {what}, "
                f"write {together!r}; otherwise keep the pattern and ignore this warning."
            )
            return Pass(stage, run, False, remedy)
    return Pass(stage, run, True)


def unrolled_for(one: Pass, loop: fx.Node) -> str:
    """The warning that a loop is unrolled for a pass."""
    count = loop.target.count  # type: ignore[union-attr]  # a LoopCall
    return (
        f"{one.name} (stage {one.stage.name}) does not read loops: the {count} iterations of the loop at "
        f"{SOURCE.get(loop)} are unrolled, each planned and compiled by itself. {one.remedy}"
    )


def applied(program: Program, passes: Iterable[Pass]) -> Program:
    """The program after passes; one that does not read loops receives it without them."""
    for one in passes:
        if not one.reads_loops and has_loops(program):
            program = noted(program, one.name)
        program = one(program)
    return program


def noted(program: Program, why: str) -> Program:
    """The program without loops, whose text says which it had, and for whom they were unrolled."""
    loops = {LOOP.of(node): None for node in program.calls if LOOP.on(node)}
    which = ", ".join(f"{loop.name} × {loop.count}" for loop in loops)
    return replace(unrolled(program), unrolled=f"{which}, for {why}")
