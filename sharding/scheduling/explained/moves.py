"""The moves of a decision, as the model counts them, and the collectives of its program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import fx

from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.records import titled_table
from torchard.functional.reports.time import duration
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.planning.decision import Given, LayoutDecision
from torchard.sharding.planning.minimum.alternatives import values_of
from torchard.sharding.planning.minimum.model import Transfer
from torchard.sharding.rules import Call

__all__ = ["PlannedMove", "PlannedTransfer", "given_layouts", "moves", "transfers_table"]

_LISTED = 12  # rows of a table


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


class PlannedTransfer(NamedTuple):
    """A collective of a plan: one of a move, or one that an operation itself sends.

    Attributes:
        sent: what is sent each time.
        times: how often.
        source: the line that needs it.
        merged: whether only a part of a latency is counted, because it will be merged with others.
    """

    sent: Transfer
    times: int
    source: str
    merged: bool = False

    @property
    def seconds(self) -> float:
        """The seconds of all times."""
        return self.sent.seconds * self.times


def transfers_table(transfers: Iterable[PlannedTransfer]) -> list[str]:
    """The lines of a table of what is sent, the longest first; none if nothing is."""
    totals: dict[tuple[str, int, str, bool], tuple[float, int]] = {}
    for each in transfers:
        kind = f"{each.sent.kind}({'·'.join(each.sent.axes)})"
        key = kind, math.ceil(each.sent.bytes), each.source, each.merged
        seconds, count = totals.get(key, (0.0, 0))
        totals[key] = seconds + each.seconds, count + each.times
    if not totals:
        return []
    order = sorted(totals.items(), key=lambda each: -each[1][0])
    rows = [("seconds", "times", "collective", "bytes each", "source", "note")]
    rows += [
        (duration(seconds), str(count), kind, f"{size:,}", source, "merged" if merged else "")
        for (kind, size, source, merged), (seconds, count) in order[:_LISTED]
    ]
    rest = order[_LISTED:]
    if rest:
        seconds = sum(seconds for _, (seconds, _) in rest)
        rows.append((duration(seconds), str(sum(n for _, (_, n) in rest)), "all others", "", "", ""))
    noted = any(merged for *_, merged in totals)
    return ["", titled_table([row if noted else row[:-1] for row in rows])]


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
