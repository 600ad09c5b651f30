"""The rolled form of a program: the bodies of its loops in its own graph, once each.

Where a loop reads rows that another loop with as many iterations made, it reads the other's values, and
operations that both have are made once, in the first. So the pullback of a loop, whose body has
the operations of the forward before its own, becomes what a backward is in a program without loops: it
reads values of the forward, and nothing is computed twice.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.scope_frames import path_of
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.effects.unused_results import may_have_effects
from torchard.functional.loops.branch_call import BranchCall, branch_calls
from torchard.functional.loops.call import LoopCall, loop_calls
from torchard.functional.programs.graphs import frozen
from torchard.functional.programs.markers import (
    Loop,
    again,
    chosen,
    enter,
    goes_on,
    leave,
    row,
    rows,
    total,
)
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import inherit, put
from torchard.functional.programs.tags import (
    BRANCH,
    FRAMES,
    LOOP,
    ORIGIN,
    PHASE,
    RECOMPUTE,
    SCOPE,
    SEGMENTS,
    VAL,
)
from torchard.functional.programs.unrolled import unrolled
from torchard.functional.programs.views import sweep
from torchard.functional.torch_internals.operators import aten

__all__ = ["rolled", "straight_line"]


def rolled(program: Program, is_part: bool = False) -> Program:
    """The program with the bodies of its loops in its graph; loops inside loops are unrolled.

    Args:
        is_part: whether the graph becomes part of a loop or a conditional, or its loops must be unrolled:
            then open loops, which cannot be, stay operations.
    """
    if not loop_calls(program.graph) and not branch_calls(program.graph):
        return program
    graph = _Rolled(program.graph, is_part).run()
    return replace(program, graph=graph)


def straight_line(program: Program) -> Program:
    """The program without loops: all iterations, one after the other."""
    return unrolled(rolled(program, is_part=True))


@dataclass
class _Rolled:
    old: fx.Graph
    is_part: bool
    new: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, Any] = field(default_factory=dict)
    # Operations in loops, and those that are the same in all iterations, by what they compute.
    known: dict[Hashable, fx.Node] = field(default_factory=dict)
    origins: int = 0

    def run(self) -> fx.Graph:
        self.origins = max((ORIGIN.get(node, 0) for node in self.old.nodes), default=0)
        for node in self.old.nodes:
            if isinstance(node.target, LoopCall) and not (self.is_part and node.target.is_open):
                self.env[node] = _Body(self, node, node.target).run()
            elif isinstance(node.target, BranchCall):
                self.env[node] = _Branches(self, node, node.target).run()
            elif isinstance(self.env.get(_whole(node)), list):
                self.env[node] = self.env[_whole(node)][node.args[1]]
            else:
                self.env[node] = made = self.new.node_copy(node, self.env.__getitem__)
                if made.target is aten.view.default:  # what leaves a body may have other strides
                    made.target = aten.reshape.default
        sweep(self.new)
        return self.new


def _whole(node: fx.Node) -> Any:
    """The node of which a node is an item; None for other nodes."""
    return node.args[0] if node.target is operator.getitem else None


class _Inlined:
    """Puts the operations of a node's programs in the graph."""

    def __init__(self, parent: _Rolled, node: fx.Node) -> None:
        self.parent, self.node = parent, node
        self.graph = parent.new
        self.env: dict[fx.Node, fx.Node] = {}
        self.origins: dict[int, int] = {}
        self.fakes: Any = VAL.of(next(iter(parent.old.nodes))).fake_mode

    def _after(self, target: Any, value: fx.Node, val: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, (value, *args))
        inherit(node, self.node)
        VAL.set(node, val)
        return node

    def _tag_place(self, made: fx.Node, node: fx.Node) -> None:
        """The tags that depend on where the loop is."""
        outer = FRAMES.get(self.node, ())
        frames = (*outer, *FRAMES.get(node, ()))
        segments = (
            *SEGMENTS.get(self.node, ()),
            *(segment.inside(outer) for segment in SEGMENTS.get(node, ())),
        )
        if frames:
            put(made, {FRAMES: frames, SCOPE: path_of(frames)})
        if segments:
            SEGMENTS.set(made, segments)
        if PHASE.get(self.node) == "backward":
            PHASE.set(made, "backward")
        if ORIGIN.on(node):
            ORIGIN.set(made, self._origin(ORIGIN.of(node)))

    def _origin(self, number: int) -> int:
        """The number in this program of an operation of the body."""
        if number not in self.origins:
            self.parent.origins += 1
            self.origins[number] = self.parent.origins
        return self.origins[number]

    def _val(self, val: Any) -> Any:
        """The fake value, as one of this program's."""
        if isinstance(val, (tuple, list)):
            return type(val)(map(self._val, val))
        if not isinstance(val, torch.Tensor):
            return val
        with internals.no_modes():
            spec = TensorSpec.of(val)
        return internals.fake(self.fakes, spec)

class _Branches(_Inlined):
    """Puts one conditional in the graph: all branches, and selections among their results."""

    def __init__(self, parent: _Rolled, node: fx.Node, call: BranchCall) -> None:
        super().__init__(parent, node)
        self.call = call

    def run(self) -> list[fx.Node]:
        """The nodes of its results."""
        given: Any = self.node.args
        index, *operands = (self.parent.env[operand] for operand in given)
        results = [self._branch(branch, operands) for branch in self.call.branches]
        return [
            self._after(chosen, index, self._val(VAL.of(node)), *values)
            for node, *values in zip(self.call.branches[0].results, *results, strict=True)
        ]

    def _branch(self, branch: Program, operands: list[fx.Node]) -> list[fx.Node]:
        """The nodes of the results of one branch."""
        body, taken = straight_line(branch), object()
        self.env.update(zip(body.placeholders, operands, strict=True))
        for node in body.calls:
            made = self.graph.node_copy(node, self.env.__getitem__)
            self._tag_place(made, node)
            VAL.set(made, self._val(VAL.of(node)))
            BRANCH.set(made, taken)
            self.env[node] = made
        return [self.env[node] for node in body.results]


class _Body(_Inlined):
    """Puts one loop in the graph."""

    def __init__(self, parent: _Rolled, node: fx.Node, call: LoopCall) -> None:
        super().__init__(parent, node)
        self.call = call
        outside = len(FRAMES.get(node, ()))
        self.loop = Loop(
            call.count, call.reverse, call.body.name, outside=outside, is_open=call.is_open
        )
        self.first: fx.Node | None = None
        self.effects: Counter[Hashable] = Counter()

    def run(self) -> list[fx.Node]:
        """The nodes of the loop's results."""
        body = straight_line(self.call.body)
        given: Any = self.node.args
        operands = [self.parent.env[operand] for operand in given]
        inputs = body.placeholders
        for placeholder, operand, takes in zip(inputs, operands, self.call.takes, strict=True):
            self.env[placeholder] = self._input(placeholder, operand, takes)
        if self.call.is_open:
            self._add(inputs[0], goes_on, (self.env[inputs[0]],), inside=True)
        for node in body.calls:
            self.env[node] = self._operation(node)
        return self._results(body)

    def _input(self, placeholder: fx.Node, operand: fx.Node, takes: str) -> fx.Node:
        if takes == "shared":
            return operand
        if takes == "row":
            made = operand.all_input_nodes[0] if operand.target is rows else operand
            if made is not operand and LOOP.of(made).count == self.loop.count:
                return made
            return self._made(placeholder, row, (operand,), inside=True)
        if self.call.is_open:  # it may leave as it is, after no iteration, but not as an argument
            operand = self._before(aten.clone.default, operand)
        return self._add(placeholder, enter, (operand,), inside=True)

    def _before(self, target: Any, operand: fx.Node) -> fx.Node:
        with self._place(target, (), inside=False):
            return self._after(target, operand, self._val(VAL.of(operand)))

    def _operation(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.env.__getitem__)
        operands: list[fx.Node] = []
        fx.map_arg((args, kwargs), operands.append)
        inside = may_have_effects(node.target) or any(map(LOOP.on, operands))
        return self._made(node, node.target, args, kwargs, inside)

    def _made(
        self, node: fx.Node, target: Any, args: Any, kwargs: Any = None, inside: bool = False
    ) -> fx.Node:
        """The node that computes this already, or a new one."""
        if RECOMPUTE.get(node) or BRANCH.on(node):
            return self._add(node, target, args, kwargs, inside)
        key: Hashable = (target, frozen(args), frozen(kwargs or {}), inside and self.loop.count)
        if may_have_effects(target):  # each call counts; a derivative has those of its forward
            self.effects[key] += 1
            key = key, self.effects[key]
        found = self.parent.known.get(key)
        if found is None:
            found = self.parent.known[key] = self._add(node, target, args, kwargs, inside)
        elif ORIGIN.on(node) and ORIGIN.on(found):
            self.origins[ORIGIN.of(node)] = ORIGIN.of(found)
        return found

    def _add(
        self, node: fx.Node, target: Any, args: Any, kwargs: Any = None, inside: bool = False
    ) -> fx.Node:
        """A new node in the loop, or before it, with the tags that the body's node has."""
        with self._place(target, args, inside):
            made = self.graph.call_function(target, args, kwargs or {})
        if target is node.target:
            inherit(made, node, "call")
            self._tag_place(made, node)
        else:
            inherit(made, self.node)
        VAL.set(made, self._val(VAL.of(node)))
        if inside:
            whole = args[0] if target is operator.getitem else None
            LOOP.set(made, self.loop if whole is None else LOOP.of(whole))
            if whole is not None:
                PHASE.set(made, PHASE.of(whole))
            elif self.first is None:
                self.first = made
        return made

    def _place(
        self, target: Any, args: Any, inside: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Where a node is inserted: an item with its tuple, what no iteration changes before the loop."""
        if target is operator.getitem:
            return self.graph.inserting_after(args[0])
        if inside or self.first is None:
            return contextlib.nullcontext()
        return self.graph.inserting_before(self.first)

    # -- what leaves the loop ---------------------------------------------------------------------

    def _results(self, body: Program) -> list[fx.Node]:
        values = [self.env[value] for value in body.results]
        entered = [self.env[body.placeholders[i]] for i in self.call.inputs("carry")]
        made: dict[int, fx.Node] = {}
        for i, enters in zip(self.call.outputs("carry"), entered, strict=True):
            made[i] = self._add(body.results[i], again, (values[i], enters), inside=True)
        results = []
        for i, (value, gives) in enumerate(zip(values, self.call.gives, strict=True)):
            if gives == "carry":
                results.append(self._after(leave, made[i], VAL.of(made[i])))
            elif gives == "rows":
                results.append(self._stacked(value))
            else:
                results.append(self._total(value))
        return results

    def _stacked(self, value: fx.Node) -> fx.Node:
        count, val = self.loop.count, VAL.of(value)
        with internals.no_modes(), self.fakes:
            stacked = val.new_empty((count, *val.shape))
        if LOOP.on(value):
            return self._after(rows, value, stacked, count)
        lifted = self._after(aten.unsqueeze.default, value, val.unsqueeze(0), 0)
        return self._after(aten.expand.default, lifted, stacked, list(stacked.shape))

    def _total(self, value: fx.Node) -> fx.Node:
        if LOOP.on(value):
            return self._after(total, value, VAL.of(value))
        return self._after(aten.mul.Tensor, value, VAL.of(value), self.loop.count)
