"""The rolled form of a straight-line program: layers that a Python loop applied become iterations.

What each layer has of its own, as its parameters, is listed; values of one layer that are read outside of
the layers are items. So nothing is stacked, and the unrolled program is the one it was made from.

Unlike `functionalize(stacked=)`, this needs no module, and allows layers that take turns and work between
layers; but every layer is traced first (tests/functional/loops/test_depth.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.scope_frames import Frame, path_of
from torchard.functional.loops.equal_layers import layers_of
from torchard.functional.loops.layers import (
    Carry,
    Entered,
    EqualLayers,
    Inside,
    Listed,
    SameRow,
    Shared,
    Source,
    owners,
)
from torchard.functional.programs.markers import (
    Loop,
    again,
    enter,
    item,
    leave,
    listed,
    row,
    rows,
    total,
)
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import Tag, Tags, forget, inherit, put
from torchard.functional.programs.tags import FRAMES, LOOP, SCOPE, SEGMENTS, VAL
from torchard.functional.torch_internals import ProgramGraph

__all__ = ["recognised"]


def recognised(program: Program) -> Program:
    """The program with its equal layers rolled into loops; itself if it has none."""
    found = layers_of(program)
    if not found:
        return program
    return replace(program, graph=_Recognised(program.graph, found).run())


@dataclass
class _Rolling:
    """Equal layers on their way into a loop."""

    loop: Loop
    # Where the loop is.
    outside: Tags
    # The loop's operations, by their place in the layer; what enters an iteration, and is handed on.
    operations: list[fx.Node] = field(default_factory=list)
    entered: dict[Carry, fx.Node] = field(default_factory=dict)
    handed: dict[Carry, fx.Node] = field(default_factory=dict)
    # The rows of what is read outside of the loop, by the operation's place.
    stacked: dict[int, fx.Node] = field(default_factory=dict)


class _Recognised:
    def __init__(self, old: fx.Graph, found: Sequence[EqualLayers]) -> None:
        self.old, self.new = old, ProgramGraph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.of = owners(found)
        self.rolling: dict[EqualLayers, _Rolling] = {}
        self.listed: dict[Listed, fx.Node] = {}
        self.frames: dict[tuple[Frame, ...], Frame] = {}
        self.fakes: Any = VAL.of(next(iter(old.nodes))).fake_mode

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            layers = self.of.get(node)
            if layers is None:
                self.env[node] = self.new.node_copy(node, self._value)
            elif layers not in self.rolling:
                self._loop(layers)
        return self.new

    def _value(self, node: fx.Node) -> fx.Node:
        """The value of a node outside of the loops."""
        if node not in self.env:
            self.env[node] = self._of_one_layer(self.of[node], node)
        return self.env[node]

    def _of_one_layer(self, layers: EqualLayers, node: fx.Node) -> fx.Node:
        """The value of one layer, read outside of it."""
        rolling, (turn, operation) = self.rolling[layers], layers.place[node]
        if operation in layers.sums:
            return self._sum(layers, rolling, node)
        if turn == layers.count - 1:
            for carry, handed in rolling.handed.items():
                if carry.operation == operation:
                    return self._after(rolling, leave, (handed,), node)
        if operation not in rolling.stacked:
            value = rolling.operations[operation]
            stacked = self._after(rolling, rows, (value, layers.count), node, layers.count)
            rolling.stacked[operation] = stacked
        return self._after(rolling, item, (rolling.stacked[operation], layers.turn(turn)), node)

    def _sum(self, layers: EqualLayers, rolling: _Rolling, node: fx.Node) -> fx.Node:
        """A sum over all layers, which its last addition computed."""
        known = layers.sums[layers.place[node][1]]
        term = rolling.operations[known.term]
        summed = self._after(rolling, total, (term,), layers.nodes[-1][known.term])
        return self._copy(node, [self._value(known.first), summed])

    def _after(
        self, rolling: _Rolling, target: Any, args: Any, like: fx.Node, count: int | None = None
    ) -> fx.Node:
        made = self._add(target, args, like, count)
        forget(made, *_PLACE)
        put(made, rolling.outside)
        return made

    def _add(self, target: Any, args: Any, like: fx.Node, count: int | None = None) -> fx.Node:
        """A node with the value of another, or with a row of it for each iteration."""
        made = self.new.call_function(target, args)
        inherit(made, like, "value" if count is None else "place")
        if count is not None:
            val = VAL.of(like)
            with internals.no_modes(), self.fakes:
                VAL.set(made, torch.empty((count, *val.shape), dtype=val.dtype, device=val.device))
        return made

    # -- a loop -----------------------------------------------------------------------------------

    def _loop(self, layers: EqualLayers) -> None:
        first = layers.nodes[layers.turn(0)]
        placed = [self._place([layer[j] for layer in layers.nodes], layers) for j in range(len(first))]
        loop = Loop(layers.count, layers.reverse, _common(placed))
        rolling = _Rolling(loop, _outside([node for layer in layers.nodes for node in layer]))
        self.rolling[layers] = rolling
        lists = [self._list(s) for sources in layers.sources for s in sources if isinstance(s, Listed)]
        for carry in layers.carries:
            value = self._value(carry.first)
            rolling.entered[carry] = self._inside(rolling, enter, (value,), first[carry.operation])
        taken = {stacked: self._inside(rolling, row, (stacked,), like) for stacked, like in lists}
        for j, (node, sources, tags) in enumerate(zip(first, layers.sources, placed, strict=True)):
            if j in layers.sums:
                rolling.operations.append(node)  # nothing in the loop reads it
                continue
            operands = [self._operand(rolling, source, taken) for source in sources]
            made = self._copy(node, operands)
            put(made, tags)
            LOOP.set(made, rolling.loop)
            rolling.operations.append(made)
        for carry, entered in rolling.entered.items():
            value = rolling.operations[carry.operation]
            rolling.handed[carry] = self._inside(rolling, again, (value, entered), value)

    def _copy(self, node: fx.Node, operands: Sequence[fx.Node]) -> fx.Node:
        """A node of the same operation, on other operands as they stand in its arguments."""
        rest = iter(operands)
        return self.new.node_copy(node, lambda _: next(rest))

    def _list(self, source: Listed) -> tuple[fx.Node, fx.Node]:
        """The node that lists some values, and one of them."""
        like = source.values[0]
        if source not in self.listed:
            values = [self._value(value) for value in source.values]
            self.listed[source] = self._add(listed, (values,), like, len(values))
        return self.listed[source], like

    def _inside(self, rolling: _Rolling, target: Any, args: Any, like: fx.Node) -> fx.Node:
        made = self.new.call_function(target, args)
        inherit(made, like)
        forget(made, *_PLACE)
        put(made, rolling.outside)
        VAL.set(made, VAL.of(like))
        LOOP.set(made, rolling.loop)
        return made

    def _operand(
        self, rolling: _Rolling, source: Source, taken: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        if isinstance(source, Inside):
            return rolling.operations[source.operation]
        if isinstance(source, Carry):
            return rolling.entered[source]
        if isinstance(source, SameRow):
            return self.rolling[source.layers].operations[source.operation]
        if isinstance(source, Entered):
            return self.rolling[source.layers].entered[source.carry]
        if isinstance(source, Listed):
            return taken[self.listed[source]]
        assert isinstance(source, Shared)
        return self._value(source.value)

    # -- where its operations are -----------------------------------------------------------------

    def _place(self, nodes: Sequence[fx.Node], layers: EqualLayers) -> Tags:
        """The tags of an operation that is in the frames of all layers."""
        tags: dict[Tag[Any], Any] = {}
        if FRAMES.get(nodes[0]):
            tags[FRAMES] = self._of_all([FRAMES.of(node) for node in nodes], layers)
            tags[SCOPE] = path_of(tags[FRAMES])
        if segments := SEGMENTS.get(nodes[layers.turn(0)]):
            own = [SEGMENTS.of(node) for node in nodes]
            kept = [self._of_all([each[i].frames for each in own], layers) for i in range(len(segments))]
            marks = zip(segments, kept, strict=True)
            tags[SEGMENTS] = tuple(replace(segment, frames=inside) for segment, inside in marks)
        return tags

    def _of_all(self, frames: Sequence[tuple[Frame, ...]], layers: EqualLayers) -> tuple[Frame, ...]:
        return tuple(self._frame(layers.by_row(each)) for each in zip(*frames, strict=True))

    def _frame(self, each: tuple[Frame, ...]) -> Frame:
        """The frame that stands for one of each layer."""
        if all(frame is each[0] for frame in each):
            return each[0]
        if each not in self.frames:
            name = numbered([frame.name for frame in each])
            self.frames[each] = replace(each[0], name=name, each=each)
        return self.frames[each]


# The tags that say where an operation is.
_PLACE = (FRAMES, SCOPE, SEGMENTS)


def _outside(nodes: Sequence[fx.Node]) -> Tags:
    """The tags of the place that all of some nodes are in."""
    tags: dict[Tag[Any], Any] = {}
    if frames := _prefix([FRAMES.get(node, ()) for node in nodes]):
        tags = {FRAMES: frames, SCOPE: path_of(frames)}
    if segments := _prefix([SEGMENTS.get(node, ()) for node in nodes]):
        tags[SEGMENTS] = segments
    return tags


def _prefix(sequences: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """What all begin with."""
    same = takewhile(lambda column: len({*column}) == 1, zip(*sequences, strict=False))
    return tuple(column[0] for column in same)


def _common(placed: Sequence[Tags]) -> str:
    """The scope that all operations of a layer are in."""
    return path_of(_prefix([tags.get(FRAMES, ()) for tags in placed])) or "layers"


def numbered(names: Sequence[str]) -> str:
    """One name for those of all rows: ``layers.*`` from layers.0 on, ``layers.{2+i}`` from layers.2 on.

    >>> from torchard.functional.loops.recognised import numbered
    >>> numbered(["layers.1", "layers.3", "layers.5"])
    'layers.{1+2i}'
    """
    if len(set(names)) == 1:
        return names[0]
    apart = [re.split(r"(\d+)", name) for name in names]
    parts = [_numbered(column) for column in zip(*apart, strict=True)]
    return "".join(parts)


def _numbered(parts: Sequence[str]) -> str:
    if len(set(parts)) == 1:
        return parts[0]
    first, step = int(parts[0]), int(parts[1]) - int(parts[0])
    if any(part != str(first + i * step) for i, part in enumerate(parts)):
        return f"{{{'|'.join(parts)}}}"
    if (first, step) == (0, 1):
        return "*"
    sign, size = "+" if step > 0 else "-", abs(step)
    return f"{{{first}{sign}{'' if size == 1 else size}i}}"
