"""From a graph to the list of what runs: operations in order, each value dropped after its last read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx

from torchard.functional.execution.instructions import Inputs, Instruction, Return
from torchard.functional.execution.loop_code import Lives, dropped, loop_instructions, operation
from torchard.functional.execution.reads import HalfOf
from torchard.functional.execution.reinplacing import Reinplaced, reinplaced
from torchard.functional.execution.storages import Liveness, Results, alive
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.loops import regrouped
from torchard.functional.programs.running_sums import in_place
from torchard.functional.programs.tags import LOOP
from torchard.functional.updates.in_place import in_copies

__all__ = ["RankList", "instructions_of", "what_runs"]


class RankList(NamedTuple):
    """What one rank runs, as it is read by models of it.

    Attributes:
        runs: the instructions, and which of them write in place.
        results: what operations compute.
        values: the value of each node on the rank, in one iteration; None if its own tag is right.
        home: the rank's coordinates along the axes of pipelines.
    """

    runs: Reinplaced
    inputs: Sequence[fx.Node]
    donated: Sequence[int]
    results: Results
    values: Mapping[fx.Node, Any] | None = None
    home: Mapping[str, int] = MappingProxyType({})

    @property
    def alive(self) -> Liveness:
        return alive(self.runs.instructions, self.inputs, self.donated, self.results)


def what_runs(
    graph: fx.Graph, donated: Collection[int] = (), half_of: HalfOf = lambda node: None
) -> tuple[fx.Graph, Reinplaced]:
    """What generated code runs: with running sums, updates and writes in place.

    Args:
        donated: the positions of the inputs whose memory the call may take.
        half_of: as that of `reinplaced`.

    Returns:
        The graph whose nodes the instructions are of, which is a copy if it has running sums or updates;
        and these.
    """
    graph = in_place(graph) or graph
    graph = in_copies(graph) or graph
    inputs = list(graph.find_nodes(op="placeholder"))
    return graph, reinplaced(instructions_of(regrouped(graph)), inputs, donated, half_of)


def instructions_of(order: Sequence[fx.Node]) -> list[Instruction]:
    """The instructions for nodes in this order: placeholders, operations, loops, and the output."""
    return list(_instructions(order))


def _instructions(order: Sequence[fx.Node]) -> Iterator[Instruction]:
    slots = {node: f"v{i}" for i, node in enumerate(order)}
    inputs = [node for node in order if node.op == "placeholder"]
    yield Inputs([slots[node] for node in inputs])
    yield from dropped([slots[node] for node in inputs if not node.users])
    lives = Lives(order, slots)
    for loop, nodes in groupby(order, key=LOOP.get):
        if loop is not None:
            yield from loop_instructions(loop, list(nodes), lives)
            continue
        for node in nodes:
            dead = lives.dead_after(node)
            if node.op == "output":
                yield Return(list(output_values(node.graph)), slots)
            elif node.op == "call_function" and (read := lives.collected(node)) is not None:
                yield read
                yield from dropped(dead)
            elif node.op == "call_function":
                yield from operation(node, slots, dead)
