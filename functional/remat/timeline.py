"""The timeline of a rolled program: which operation runs when, and which storage it reads.

All iterations of a loop but for the first and the last ones are alike: what is alive grows or shrinks by
the same bytes in each. So the timeline has a few iterations at both ends, and one entry for all between
them, which is never the peak. What other loops read of these iterations is one storage, as large as all
of them, where these loops have the same rows between their ends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from torch import fx

from torchard.functional.execution.phases import Phases, phases_of
from torchard.functional.programs.loops import handed_on, is_apart
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
from torchard.functional.programs.running_sums import sum_so_far
from torchard.functional.programs.tags import LOOP
from torchard.functional.programs.views import base_of

__all__ = ["Event", "Place", "ProgramTimeline"]

# A value of one iteration: the node, and the row; None for what is in no loop.
Place = tuple[fx.Node, int | None]


class Event(NamedTuple):
    """An operation in the iterations of some rows, or in no loop.

    Attributes:
        ends: whether what is alive is what a run has; else the event stands for many iterations.
    """

    node: fx.Node
    rows: tuple[int | None, ...]
    ends: bool


class _Step(NamedTuple):
    """Iterations of a loop that are one entry."""

    rows: tuple[int, ...]
    ends: bool


@dataclass
class ProgramTimeline:
    """The events of operations, which are in an order in which those of a loop are together."""

    order: Sequence[fx.Node]
    events: list[Event] = field(default_factory=list)
    # For a row of a loop, the row that stands for it in what is not told apart, and the one before that.
    _stands: dict[Loop, dict[int, int]] = field(default_factory=dict)
    _before: dict[Loop, dict[int, int]] = field(default_factory=dict)
    # For the row of an entry, how many iterations that is.
    _many: dict[Loop, dict[int, int]] = field(default_factory=dict)
    # The index of a loop's last event.
    ends: dict[Loop, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        loops = [(loop, list(nodes)) for loop, nodes in groupby(self.order, key=LOOP.get)]
        phases = {loop: phases_of(nodes) for loop, nodes in loops if loop is not None}
        margin = 2 + max((each.distance for each in phases.values()), default=0)
        elsewhere = _read_elsewhere(self.order)
        self.grouped = _grouped(self.order, elsewhere)
        # What is told apart in each iteration.
        self.kept = elsewhere - self.grouped
        self.apart = {node for node in self.order if is_apart(node)}
        for loop, nodes in loops:
            if loop is None:
                self.events += [Event(node, (None,), True) for node in nodes]
            else:
                steps = list(_steps(loop, margin))
                last = [step.rows[-1] for step in steps]
                self._stands[loop] = {i: step.rows[-1] for step in steps for i in step.rows}
                self._before[loop] = dict(zip(last[1:], last, strict=False))
                self._many[loop] = {step.rows[-1]: len(step.rows) for step in steps}
                self.events += self._iterations(steps, phases[loop])
                self.ends[loop] = len(self.events) - 1

    def _iterations(self, steps: Sequence[_Step], phases: Phases) -> Iterator[Event]:
        distance = phases.distance
        for step in steps[:distance]:
            yield from self._run(phases.ahead, step)
        for i, step in enumerate(steps):
            yield from self._run(phases.arriving, step)
            for later in steps[i + distance : i + distance + 1]:
                yield from self._run(phases.ahead, later, step.ends)
            yield from self._run(phases.main, step)
            for before in steps[max(i - 1, 0) : i]:
                yield from self._run(phases.late, before, step.ends)
        yield from self._run(phases.late, steps[-1])

    def _run(self, nodes: Sequence[fx.Node], step: _Step, ends: bool | None = None) -> Iterator[Event]:
        """The operations of some iterations; of many, those are told apart that read rows or are kept."""
        for node in nodes:
            others = [n for n in node.all_input_nodes if LOOP.get(n) not in (LOOP.of(node), None)]
            apart = node in self.kept or not self.grouped.issuperset(others)
            apart |= node.target is row and not _of_inputs(node)
            yield Event(node, step.rows if apart else step.rows[-1:], step.ends if ends is None else ends)

    def many(self, place: Place) -> int:
        """How many iterations' values a storage holds."""
        node, at = place
        return self._many[LOOP.of(node)][at] if at is not None and node in self.grouped else 1

    # -- which storage a value is in ----------------------------------------------------------------

    def origin(self, place: Place) -> Place:
        """The value in whose storage a value is."""
        before: Place | None = place
        while before is not None:
            place, before = before, self._operand(before)
        node, at = place
        if at is not None and node not in self.kept:
            at = self._stands[LOOP.of(node)][at]
        return node, at

    def _operand(self, place: Place) -> Place | None:
        """Of which value this one is a view, or another name; None if it has a storage of its own."""
        node, at = place
        source: Any = node.args[0] if node.args else None
        if node.target is row and source.target is listed:
            return source.args[0][at], None
        if node.target is enter:
            return self._entered(node, at)
        if node.target is leave or (node.target is total and _has_one_term(node)):
            return source, LOOP.of(source).order()[-1]
        if node.target is item and source in self.apart:
            index: Any = node.args[1]
            return next((v, index) for v in source.all_input_nodes if index in LOOP.of(v).span)
        base = source if node.target in (again, item) else base_of(node)
        if base is None:
            return None
        return base, at if LOOP.on(base) else None

    def _entered(self, node: fx.Node, at: int | None) -> Place:
        """What enters an iteration: what the one before handed on, or the initial value."""
        loop, handing = LOOP.of(node), handed_on(node)
        assert at is not None
        if handing:
            before = at + 1 if loop.reverse else at - 1
            if node not in self.kept:
                before = self._before[loop].get(at, before)
            if before in loop.span:
                return handing[0], before
        initial: Any = node.args[0]
        return initial, at if LOOP.on(initial) else None


def _steps(loop: Loop, margin: int) -> Iterator[_Step]:
    """Iterations one by one at both ends, and all between them at once."""
    order = loop.order()
    between = order[margin:-margin]
    if len(between) < 2:
        yield from (_Step((i,), True) for i in order)
        return
    for turn, i in enumerate(order[:margin]):
        yield _Step((i,), turn < 2)  # others issue what is of those between
    yield _Step(tuple(between), False)
    yield from (_Step((i,), True) for i in order[-margin:])


def _of_inputs(node: fx.Node) -> bool:
    """Whether a row is one of inputs, which the caller holds."""
    (values,) = node.all_input_nodes
    return all(n.op == "placeholder" for n in (values.all_input_nodes or [values]))


def _has_one_term(node: fx.Node) -> bool:
    return sum(LOOP.of(value).count for value in node.all_input_nodes) == 1


def _source(node: fx.Node) -> fx.Node | None:
    """What a value is a view or an item of, or what was handed on to it."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0]
    handing = handed_on(node)
    return handing[0].all_input_nodes[0] if handing else base_of(node)


def _grouped(order: Sequence[fx.Node], elsewhere: Set[fx.Node]) -> set[fx.Node]:
    """Of these values, those that need not be told apart: all loops that read them have the same rows.

    What is handed on is in the storage of another iteration, and an item is read by itself.
    """
    inside = [node for node in order if LOOP.on(node)]
    roots: dict[fx.Node, fx.Node] = {}
    bad: set[fx.Node] = set()
    for node in inside:
        base = _source(node)
        root = roots[node] = node if base is None else roots.get(base, base)
        summed = sum_so_far(node)
        if summed is not None:
            bad.update((root, roots.get(summed, summed)))
        if root.op == "placeholder":
            continue  # the caller's, whatever reads it
        moves = node.target in (enter, again, row) or not LOOP.on(root)
        if moves or not all(_reads_alike(user, LOOP.of(node)) for user in node.users):
            bad.add(root)
    return {node for node in elsewhere if roots[node] not in bad}


def _reads_alike(user: fx.Node, loop: Loop) -> bool:
    """Whether an operation reads all rows of a loop's value alike."""
    other = LOOP.get(user)
    if other is None:
        return user.target in (rows, total) and not is_apart(user)
    return user.target is not again and other.span == loop.span


def _read_elsewhere(order: Sequence[fx.Node]) -> set[fx.Node]:
    """The operations of loops whose results are read outside of their iteration, and what they are in."""
    found: set[fx.Node] = set()
    for node in order:
        loop = LOOP.get(node)
        if loop is not None and any(LOOP.get(user) is not loop for user in node.users):
            while node not in found and LOOP.get(node) is loop:
                found.add(node)
                node = _source(node) or node
    return found
