"""Donation to regions: the operands that the code of a compiled region may write its results over."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import fx

from torchard.functional.compiling.regions import Region, Run
from torchard.functional.execution.loop_code import Lives
from torchard.functional.programs.loops import regrouped
from torchard.functional.programs.markers import listed, row
from torchard.functional.programs.tags import LOOP

__all__ = ["donated_operands"]


def donated_operands(outer: fx.Graph, donated: Sequence[int]) -> dict[Run, list[int]]:
    """By the code of regions, the positions of the operands that it may write over, in each call of it.

    These are the program's donated inputs that the call is the last to read.

    Args:
        outer: the graph that calls regions.
        donated: the positions of the program's donated inputs.
    """
    order = regrouped(outer)
    lives = Lives(order, {node: node.name for node in order})
    inputs = outer.find_nodes(op="placeholder")
    given = {inputs[i] for i in donated}
    positions: dict[Run, list[int]] = {}
    for call in order:
        if isinstance(call.target, Region):
            operands = call.args[0]
            assert isinstance(operands, list)
            last = [
                i
                for i, operand in enumerate(operands)
                if operands.count(operand) == 1 and _is_last(call, operand, given, lives)
            ]
            run = call.target.run
            positions[run] = [i for i in positions.get(run, last) if i in last]
    return positions


def _is_last(call: fx.Node, operand: fx.Node, given: set[fx.Node], lives: Lives) -> bool:
    """Whether a call is the last to read a donated input, or those that a loop reads row by row."""
    if LOOP.get(operand) is not LOOP.get(call):
        return False  # all iterations read it, or another loop does
    if operand.target is not row:
        return operand in given and _is_read_last_at(operand, lives.place[call], lives)
    (values,) = operand.all_input_nodes
    if list(operand.users) != [call] or not lives.takes_row(operand):
        return False
    return all(
        value in given and _is_read_last_at(value, lives.place[call], lives)
        for value in values.all_input_nodes
    )


def _is_read_last_at(value: fx.Node, place: int, lives: Lives) -> bool:
    """Whether a value is last read at a place, and once there."""
    places = list(_reads(value, lives))
    return max(places) == place and places.count(place) == 1


def _reads(value: fx.Node, lives: Lives) -> Iterator[float]:
    """The places where a value is read; an operation that is no region may make a view, read for ever."""
    for user in value.users:
        if user.target is listed:
            yield max((lives.place[reader] for reader in user.users), default=0)
        else:
            yield lives.place[user] if isinstance(user.target, Region) else math.inf
