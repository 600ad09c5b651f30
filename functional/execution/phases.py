"""Phases of a loop's iterations: what is issued ahead of them, and what is awaited after them.

A collective that depends on no carry, as the gather of a layer's parameters, may be issued some
iterations before its result is used. One whose result no operation of the iteration reads, as the scatter
of a gradient, is awaited an iteration later. So both overlap with another iteration's computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from torchard.functional.programs.loops import issued_ahead
from torchard.functional.programs.markers import again, row
from torchard.functional.programs.tags import AHEAD, LOOP, STAGE

__all__ = ["Phases", "phases_of"]


@dataclass(frozen=True)
class Phases:
    """The operations of an iteration.

    Attributes:
        ahead: the operations that are issued ``distance`` iterations before, in order.
        distance: the number of iterations; 0 if no operations are issued ahead.
        arriving: the operations that wait for results that were issued ahead, and unpack the results.
        main: all other operations.
        late: the operations that run after the next iteration.
    """

    ahead: list[fx.Node]
    distance: int
    arriving: list[fx.Node]
    main: list[fx.Node]
    late: list[fx.Node]

    @property
    def early(self) -> list[fx.Node]:
        """The values issued ahead that are read later."""
        ahead, own = set(self.ahead), set(self.main)
        return [n for n in self.ahead if n not in own and not ahead.issuperset(n.users)]

    @property
    def pending(self) -> list[fx.Node]:
        """The values that are read after the next iteration."""
        read = (operand for node in self.late for operand in node.all_input_nodes)
        return [n for n in dict.fromkeys(read) if LOOP.on(n) and n not in self.late]


def phases_of(nodes: Sequence[fx.Node]) -> Phases:
    """The phases of the operations of a loop."""
    ahead, distance = issued_ahead(nodes)
    issued = set(ahead)
    arriving = [n for n in nodes if distance and AHEAD.get(n) and n not in issued]
    late = _late([n for n in nodes if n not in issued and n not in arriving])
    apart = {*issued, *arriving, *late}
    # A row is as free to take again as a view.
    again_taken = {n for n in ahead if n.target is row and not issued.issuperset(n.users)}
    main = [n for n in nodes if n not in apart or n in again_taken]
    return Phases(ahead, distance, arriving, main, late)


def _late(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The values computed only of results that the iteration awaits for others to read after it."""
    late: set[fx.Node] = set()
    for node in nodes:
        if _awaits(node) or _is_of(node, late):
            late.add(node)
    before = len(late) + 1
    while len(late) < before:  # a value that is not late makes its operands and its readers not late
        before = len(late)
        late -= {n for n in late if any(LOOP.get(u) is LOOP.of(n) and u not in late for u in n.users)}
        late -= {n for n in late if not _awaits(n) and not _is_of(n, late)}
    return [node for node in nodes if node in late]


def _awaits(node: fx.Node) -> bool:
    return STAGE.get(node) == "wait" and len(_sources(node)) == 1


def _is_of(node: fx.Node, late: set[fx.Node]) -> bool:
    """Whether a node is computed of late values alone."""
    sources = _sources(node)
    return bool(sources) and late.issuperset(sources) and node.target is not again


def _sources(node: fx.Node) -> list[fx.Node]:
    return [operand for operand in node.all_input_nodes if LOOP.on(operand)]
