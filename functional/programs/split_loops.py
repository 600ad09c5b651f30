"""Loops in two: of the first rows, and of the others. The program computes what it did.

A rewrite may then treat the two differently: a budget recomputes more of the first layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import fx

from torchard.functional.programs.loops import handed_on, regrouped
from torchard.functional.programs.markers import Loop, leave
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import forget, inherit
from torchard.functional.programs.tags import LOOP

__all__ = ["related_loops", "split_loops"]

Copies = dict[fx.Node, fx.Node]


def related_loops(graph: fx.Graph) -> list[list[Loop]]:
    """The loops of a graph in the order in which they begin, those that read rows of another with it."""
    together: dict[Loop, list[Loop]] = {}
    for node in regrouped(graph):
        if (loop := LOOP.get(node)) is None:
            continue
        mine = together.setdefault(loop, [loop])
        for operand in node.all_input_nodes:
            if LOOP.on(operand) and (other := together[LOOP.of(operand)]) is not mine:
                mine[:0] = other
                together.update(dict.fromkeys(other, mine))
    return list({id(group): group for group in together.values()}.values())


def split_loops(
    program: Program, at: Mapping[Loop, int]
) -> tuple[Program, dict[fx.Node, tuple[fx.Node, fx.Node]]]:
    """The program with some of its loops in two.

    Args:
        at: for each of them, the first row of the second part, which is not its own first. Loops that
            read rows of each other are split at the same row.

    Returns:
        The program; and for each node its copies, in the first rows and in the others. They are the same
        for a node that is in none of these loops.
    """
    making = _Split(program.graph, at)
    graph = making.run()
    firsts, others = making.parts
    return replace(program, graph=graph), {node: (firsts[node], others[node]) for node in firsts}


@dataclass
class _Split:
    old: fx.Graph
    at: Mapping[Loop, int]
    new: fx.Graph = field(default_factory=fx.Graph)
    # The copies of nodes in the first rows, and in the others.
    parts: tuple[Copies, Copies] = field(default_factory=lambda: ({}, {}))

    def run(self) -> fx.Graph:
        for loop, group in groupby(regrouped(self.old), key=LOOP.get):
            nodes = list(group)
            if loop is not None and loop in self.at:
                self._in_two(nodes, loop, self.at[loop])
                continue
            for node in nodes:
                self.parts[0][node] = self.parts[1][node] = self._copy(node)
        return self.new

    def _in_two(self, nodes: Sequence[fx.Node], loop: Loop, row: int) -> None:
        """Add both parts of a loop, in the order in which they run."""
        firsts = replace(loop, count=row - loop.first)
        others = replace(loop, count=loop.span.stop - row, first=row)
        runs = [(firsts, self.parts[0]), (others, self.parts[1])]
        if loop.reverse:
            runs.reverse()
        entering: Copies = {}
        for part, copies in runs:
            self._part(nodes, part, copies, entering)
            entering = {n: self._leave(n, copies) for n in nodes if handed_on(n)}

    def _part(self, nodes: Sequence[fx.Node], loop: Loop, copies: Copies, entering: Copies) -> None:
        """Add the operations of one part of a loop, which some values enter from the part before."""
        for node in nodes:
            copies[node] = self.new.node_copy(node, copies.__getitem__)
            if node in entering:
                copies[node].args = (entering[node],)
            LOOP.set(copies[node], loop)

    def _leave(self, entered: fx.Node, copies: Copies) -> fx.Node:
        """The last value that a part of a loop passes to the other part."""
        (handing,) = handed_on(entered)
        left = self.new.call_function(leave, (copies[handing],))
        inherit(left, handing, "value")
        forget(left, LOOP)
        return left

    def _copy(self, node: fx.Node) -> fx.Node:
        """A node that is in none of these loops; what collects values does so of both parts."""
        copy = self.new.node_copy(node, self.parts[0].__getitem__)
        if self.at.keys().isdisjoint(map(LOOP.get, node.all_input_nodes)):
            return copy
        values = [part for source in node.all_input_nodes for part in self._in_order(source)]
        others = [argument for argument in node.args if not isinstance(argument, fx.Node)]
        copy.args = (values[-1],) if node.target is leave else (values[0], *others, *values[1:])
        return copy

    def _in_order(self, node: fx.Node) -> list[fx.Node]:
        """The copies of a loop's value in the order in which they are computed."""
        loop: Any = LOOP.of(node)
        copies = [part[node] for part in self.parts]
        if loop not in self.at:
            return copies[:1]
        return copies[::-1] if loop.reverse else copies
