"""The moves of a decision, as the model counts them, and the collectives of its program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import fx

from torchard.functional.programs.graphs import output_values
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.planning.decision import Given, LayoutDecision
from torchard.sharding.planning.minimum.alternatives import values_of
from torchard.sharding.rules import Call

__all__ = ["PlannedMove", "given_layouts", "moves"]


class PlannedMove(NamedTuple):
    """A value that is moved for an operation, or for all that read it.

    Attributes:
        value: the value.
        user: the operation, or the value itself.
        have, want: the layouts from which and to which it is moved, perhaps the same.
    """

    value: fx.Node
    user: fx.Node
    have: Layout
    want: Layout


Seconds = Callable[[PlannedMove], float]


def given_layouts(given: Given, decision: LayoutDecision) -> dict[fx.Node, Layout]:
    """The layouts of inputs and constraints; a cotangent has that of its output."""
    inputs = {
        node: decision.outputs[known] if isinstance(known, int) else known[0]
        for node, known in given.inputs.items()
    }
    return inputs | given.constraints


def moves(
    graph: fx.Graph, given: Given, decision: LayoutDecision, seconds: Seconds
) -> Iterator[PlannedMove]:
    """Each move of a decision, also those from a layout to itself.

    Args:
        seconds: those of a move: of two layouts that a value is in, the nearer one is read.
    """
    fixed = given_layouts(given, decision)
    homes = decision.home | fixed

    def read(value: fx.Node, user: fx.Node, want: Layout) -> PlannedMove:
        places = dict.fromkeys([homes[value], decision.kept.get(value, homes[value])])
        return min((PlannedMove(value, user, have, want) for have in places), key=seconds)

    for node in graph.nodes:
        if node in given.constraints:
            yield read(node.all_input_nodes[0], node, fixed[node])
        elif node in given.relative:
            yield read(node.all_input_nodes[0], node, homes[node])
        elif node in decision.option and node not in fixed:
            option = decision.option[node]
            for operand, want in zip(Call.of(node).operands, option.ins, strict=True):
                yield read(operand, node, want)
            for i, value in values_of(node).items():
                yield PlannedMove(value, value, option.outs[i], homes[value])
        if node in decision.kept:
            yield PlannedMove(node, node, homes[node], decision.kept[node])
    out = graph.output_node()
    for value, want in zip(output_values(graph), decision.outputs, strict=True):
        yield read(value, out, want)
