"""Passes the values that a backward's loops read from a forward's loops, one residual for each iteration.

In a rolled program, a loop reads another loop's value of the same iteration. The halves of a joint
program run one after the other. So such a value leaves the forward's loop as one item for each iteration.
These items are residuals like all others, and enter the backward's loop as rows of a list. Nothing is
stacked. Views, and values that no result of the forward needs, are computed in the backward's loop.
"""

from __future__ import annotations

import operator
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.markers import Loop, again, enter, item, listed, row, rows
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import forget, inherit
from torchard.functional.programs.tags import AHEAD, LAYOUT, LOOP, PHASE, VAL
from torchard.functional.programs.unrolled import has_loops, unrolled
from torchard.functional.programs.views import base_of
from torchard.functional.remat.split import JointCut

__all__ = ["with_loop_residuals"]


def with_loop_residuals(program: Program) -> Program:
    """A joint program whose halves have loops; the unrolled program if a loop cannot be in one half."""
    if not has_loops(program):
        return program
    handing = _HandedOver(program.copy())
    return handing.run() if handing.is_possible() else unrolled(program)


@dataclass
class _HandedOver:
    program: Program
    cut: JointCut = field(init=False)
    loops: Set[Loop] = field(init=False)
    # (loop of the backward, value of the forward's loop) -> the node that represents the value in the
    # loop of the backward.
    inside: dict[tuple[Loop, fx.Node], fx.Node] = field(default_factory=dict)
    lists: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cut = JointCut(self.program)
        self.loops = {LOOP.of(node) for node in self.cut.forward if LOOP.on(node)}

    def is_possible(self) -> bool:
        """Whether each loop is in one half, and loops that read each other's rows have the same rows."""
        if any(LOOP.get(node) in self.loops for node in self.cut.tainted):
            return False
        return all(
            LOOP.of(operand).span == LOOP.of(node).span == range(LOOP.of(node).count)
            for node, operand in self._crossing()
        )

    def _crossing(self) -> list[tuple[fx.Node, fx.Node]]:
        """The operations in the backward's loops, each with a value that it reads of a forward loop."""
        return [
            (node, operand)
            for node in self.program.calls
            if LOOP.on(node) and LOOP.of(node) not in self.loops
            for operand in node.all_input_nodes
            if LOOP.get(operand) in self.loops
        ]

    def run(self) -> Program:
        for node, operand in self._crossing():
            node.replace_input_with(operand, self._inside(LOOP.of(node), operand, node))
        return replace(self.program)

    def _inside(self, loop: Loop, value: fx.Node, before: fx.Node) -> fx.Node:
        """The node in a backward's loop for a value of the forward's loop of the same iteration."""
        if LOOP.get(value) not in self.loops:
            return value
        if (loop, value) not in self.inside:
            whole = value.all_input_nodes[0] if value.target is operator.getitem else value
            free = base_of(value) is not None or whole not in self.cut.forward
            if free and value.target not in (enter, again):
                self.inside[loop, value] = self._again(loop, value, before)
            else:
                self.inside[loop, value] = self._row(loop, value, before)
        return self.inside[loop, value]

    def _again(self, loop: Loop, value: fx.Node, before: fx.Node) -> fx.Node:
        """A copy of the value's operation in the loop."""
        operands = {n: self._inside(loop, n, before) for n in value.all_input_nodes}
        with self.program.graph.inserting_before(before):
            made = self.program.graph.node_copy(value, operands.__getitem__)
        LOOP.set(made, loop)
        PHASE.set(made, "backward")
        return made

    def _row(self, loop: Loop, value: fx.Node, before: fx.Node) -> fx.Node:
        if value not in self.lists:
            self.lists[value] = self._list(value, before)
        made = self._call(row, (self.lists[value],), value, before)
        LOOP.set(made, loop)
        PHASE.set(made, "backward")
        return made

    def _list(self, value: fx.Node, before: fx.Node) -> fx.Node:
        """The list of the value in all iterations, outside the loop."""
        loop = LOOP.of(value)
        stacked = self._led(self._call(rows, (value, loop.count), value, before), value)
        items = [self._call(item, (stacked, i), value, before) for i in loop.span]
        return self._led(self._call(listed, (items,), value, before), value)

    def _call(self, target: Any, args: Any, like: fx.Node, before: fx.Node) -> fx.Node:
        with self.program.graph.inserting_before(before):
            made = self.program.graph.call_function(target, args)
        inherit(made, like, "value")
        forget(made, LOOP, AHEAD)
        return made

    def _led(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """A node that represents the values of all iterations."""
        val, count = VAL.of(value), LOOP.of(value).count
        with internals.no_modes(), val.fake_mode:
            VAL.set(node, torch.empty((count, *val.shape), dtype=val.dtype, device=val.device))
        if LAYOUT.on(value):
            LAYOUT.set(node, LAYOUT.of(value).with_leading(count))
        return node
