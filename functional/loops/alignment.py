"""Alignment: the layers of a forward and of its backward that become loops are the same ones.

A backward may treat its first or last layer otherwise, such as one whose input has no gradient. The
forward's loop then leaves that layer out, too: what a policy says of a value that a layer keeps for its
own backward holds only if both are in loops, or neither.

Four layers, of which the first takes an input without a gradient::

    forward             f0  f1  f2  f3      all equal
    backward            b3  b2  b1  b0      b0 lacks the product that is the input's gradient
    found               loop(f0 f1 f2 f3)   loop(b3 b2 b1)  b0
    aligned         f0  loop(f1 f2 f3)      loop(b3 b2 b1)  b0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import groupby

from torch import fx

from torchard.functional.loops.layers import EqualLayers, Listed, owners
from torchard.functional.programs.tags import PHASE

__all__ = ["aligned"]

Sourced = Callable[[list[list[fx.Node]], Sequence[EqualLayers]], EqualLayers | None]
_ROUNDS = 6


def aligned(found: Sequence[EqualLayers], sourced: Sourced, times: int) -> list[EqualLayers]:
    """The loops without layers at their ends that only some of them have; none if others remain.

    Args:
        found: loops in order, each with its operands' sources.
        sourced: finds the sources of some layers again, given the loops before; None if it cannot.
        times: how many layers a loop has at least.
    """
    loops = list(found)
    for _ in range(_ROUNDS):
        apart = _apart(loops)
        if not apart:
            return loops
        kept: list[EqualLayers] = []
        for layers in loops:
            parts = _without(layers, apart.get(layers, set()))
            again = sourced(parts, kept) if len(parts) >= times else None
            kept += [again] if again is not None else []
        loops = kept
    return []


def _apart(loops: Sequence[EqualLayers]) -> dict[EqualLayers, set[int]]:
    """For each loop, the layers that another loop lacks, which reads the others or is read by them.

    What a layer hands on does not count: it is kept whatever the policy, and enters the next layer.
    """
    of = owners(loops)
    found: dict[EqualLayers, set[int]] = {layers: set() for layers in loops}
    for layers in loops:
        for value, (turn, operation) in layers.place.items():
            readers = [user for user in value.users if user not in of and _is_backward(user)]
            if readers and not _is_backward(value) and not layers.hands_on(operation):
                found[layers].add(turn)
        for values in _listed(layers):
            _compare(layers, values, of, found)
    return {layers: turns for layers, turns in found.items() if turns}


def _listed(layers: EqualLayers) -> Iterator[tuple[fx.Node, ...]]:
    """The values of a forward, one for each layer in order, that a backward reads in no other way."""
    if not _is_backward(layers.nodes[0][0]):
        return
    for source in dict.fromkeys(source for sources in layers.sources for source in sources):
        values = source.values if isinstance(source, Listed) else ()
        if values and all(v.op == "call_function" and not _is_backward(v) for v in values):
            yield layers.by_row(values)  # rows and turns are each other's inverse


def _compare(
    layers: EqualLayers,
    values: Sequence[fx.Node],
    of: Mapping[fx.Node, EqualLayers],
    found: dict[EqualLayers, set[int]],
) -> None:
    """Find which layers of a loop read none of another, or else which of those it does not read."""
    others = [of.get(value) for value in values]
    other = next((each for each in others if each is not None), None)
    if other is None:
        return
    if other.hands_on(other.place[next(value for value in values if value in other.place)][1]):
        return
    missing = {turn for turn, each in enumerate(others) if each is not other}
    if missing:
        found[layers] |= missing
        return
    read = {other.place[value][0] for value in values}
    unread = set(range(other.count)) - read
    found[other if unread else layers] |= unread or set(range(layers.count))


def _without(layers: EqualLayers, turns: Set[int]) -> list[list[fx.Node]]:
    """The most layers that follow each other, without some."""
    kept = (list(group) for bad, group in groupby(range(layers.count), turns.__contains__) if not bad)
    longest = max(kept, key=len, default=[])
    return [layers.nodes[turn] for turn in longest]


def _is_backward(node: fx.Node) -> bool:
    return PHASE.get(node) == "backward"
