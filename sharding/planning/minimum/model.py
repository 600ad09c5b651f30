"""The seconds of a plan as a sum of terms over the choices that it makes.

Variables are the option x_o of each operation o and the place y_v of each value v: a layout, or two, of
which each operation reads the nearer:

    Σ_o work(x_o) + Σ_(o → v) move(out_v(x_o), y_v) + Σ_(v → o) move(y_v, in_v(x_o))

work is the time of the busiest rank, move that of the cheapest reshard (`layouts/reshard.py`): its bytes
by the bandwidth of its axes, and a latency for each collective. What is in a loop counts as often as it
runs. Inputs and constraints fix layouts, and outputs have those of the plan that is improved; a carry has
one layout, and a cotangent that of its output. An operation that comes apart stands beside its
decomposition (`alternatives.py`): v's state also says which of them computes it, and x_o may be off.

Not in the sum: that a value which several operations read in one third layout is moved once, that a view
is moved by its base, and that collectives are merged.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import numpy as np
from torch import fx

from torchard.functional.machines.machine import Link, Machine
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.loops import times
from torchard.functional.programs.markers import again, leave, row
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import Cost, Option
from torchard.sharding.planning.decision import Given, LayoutDecision, seconds_per_point
from torchard.sharding.planning.minimum.alternatives import (
    NONE,
    Alternatives,
    Place,
    States,
    source_of,
    values_of,
)
from torchard.sharding.planning.minimum.bounds import SweepBudget, restricted
from torchard.sharding.planning.minimum.choices import CARRIES, Choices, columns
from torchard.sharding.planning.minimum.elimination import Table, Terms, TooWide
from torchard.sharding.planning.minimum.reshards import Reshards
from torchard.sharding.rules import Call

__all__ = ["Energy", "EnergyModel", "link_within"]

_SMALLEST = 1e-16  # seconds of a byte that a rank keeps: of equal plans, the smallest is chosen
_FREE = 1e-11  # seconds of a move that sends nothing
_RESHARDS, _FEW_RESHARDS = 40_000, 4000  # pairs of layouts, on a given machine and without one
_IN_TWO = 12  # layouts of a value that may be in two
_OPTIONS = 64  # of an operation along one axis, and layouts of a value


class Energy:
    """The cost of decisions on one program."""

    def __init__(
        self, graph: fx.Graph, given: Given, sizes: Sizes, alternatives: Alternatives = NONE
    ) -> None:
        self.graph, self.given, self.sizes = graph, given, sizes
        self.alternatives = alternatives
        self.machine = given.target
        self.reshards = Reshards(sizes, self.machine, _RESHARDS if given.on else _FEW_RESHARDS)
        self._works: dict[object, Table] = {}
        self._tables: dict[object, Table] = {}
        self.budget = SweepBudget()

    def choices(self, axes: tuple[str, ...], now: LayoutDecision) -> Choices:
        """What may change along some axes.

        Raises:
            TooWide: there is too much of it.
        """
        most = _OPTIONS ** len(axes)
        return Choices(self.graph, self.given, self.sizes, axes, now, self.alternatives, most)

    def works(self, node: fx.Node, options: tuple[Option, ...]) -> Table:
        """The seconds of the busiest rank, by option."""
        rate = seconds_per_point(node, self.machine)
        val = VAL.of(node)
        item = val.dtype.itemsize if hasattr(val, "dtype") else 4
        key = options, rate, item, times(node)
        if key not in self._works:
            costs = [o.cost(self.sizes) for o in options]
            moved = np.array([self._exchange(cost, item) * times(node) for cost in costs])
            kept = np.array([c.work * rate + c.volume * item * _SMALLEST for c in costs])
            self._works[key] = moved + kept
        return self._works[key]

    def _exchange(self, cost: Cost, itemsize: int) -> float:
        """The seconds of what an operation itself sends."""
        link = link_within(cost, self.machine)
        return link.seconds(cost.exchanged * itemsize) if cost.exchanged else 0.0

    def shared(self, table: Table) -> Table:
        """The table; equal ones are one object."""
        return self._tables.setdefault((table.shape, table.tobytes()), table)


class EnergyModel:
    """The problem of one program along some axes.

    Args:
        most_in_two: values of more layouts are in two at once only where they are so already.
    """

    def __init__(self, energy: Energy, choices: Choices, most_in_two: int = _IN_TWO) -> None:
        self.energy, self.choices, self.most_in_two = energy, choices, most_in_two
        self.alternatives = energy.alternatives
        self.given, self.graph = energy.given, energy.graph
        self.table = energy.reshards.table
        self.problem = Terms()
        self.of_value: dict[fx.Node, int] = {}
        self.of_option: dict[fx.Node, int] = {}
        self.states_of: dict[fx.Node, States] = {}
        self.outputs = output_values(self.graph)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._input(node)
            elif node in self.given.constraints:
                self._fixed(node)
            elif node in self.given.relative:
                self._related(node)
            elif node in self.choices.options:
                self._operation(node)
        for i, value in enumerate(self.outputs):
            self._output(i, value)

    # -- variables --------------------------------------------------------------------------------

    def _value(self, node: fx.Node) -> tuple[int, States]:
        """The variable and the states of a value, or of all of its versions."""
        value = self.alternatives.value(node)
        return self.of_value[value], self.states_of[value]

    def _new(self, value: fx.Node, places: Iterable[Place]) -> None:
        """The variable of a value that is in one of these places."""
        versions = len(self.alternatives.versions.get(value, (value,)))
        may_be_off = source_of(value) in self.alternatives.pieces
        states = self.states_of[value] = States(tuple(places), versions, may_be_off)
        moves = [self._move(value, home, kept) for home, kept in states.places]
        costs = np.array([*moves * versions, *[0.0] * may_be_off])
        self.of_value[value] = self.problem.variable(self.energy.shared(costs))

    def _move(self, value: fx.Node, have: Layout, want: Layout) -> float:
        return 0.0 if have is want else self.energy.reshards.seconds(have, want, *_element(value))

    def _input(self, node: fx.Node) -> None:
        """An input, or a cotangent, which has the layout of its output."""
        known = self.given.inputs[node]
        self._given(node, self.choices.now.outputs[known] if isinstance(known, int) else known[0])

    def _fixed(self, node: fx.Node) -> None:
        fixed = self.given.constraints[node]
        self._given(node, fixed)
        self._read_as(node.all_input_nodes[0], fixed)

    def _given(self, node: fx.Node, home: Layout) -> None:
        """A value whose layout is given: all that read it in another one may share one move."""
        staying = node in self.choices.staying
        others = [] if staying else [x for x in self.choices.layouts[node] if not x.pending]
        self._new(node, dict.fromkeys([(home, home), *((home, x) for x in others)]))

    def _related(self, node: fx.Node) -> None:
        """A value that is read in any of the layouts that are allowed, and may be moved from there."""
        (source,) = node.all_input_nodes
        at, states = self._value(source)
        staying, relation = node in self.choices.staying, self.given.relative[node]
        layouts = [x for x in self.choices.layouts[node] if not x.pending]
        allowed = [x for x in layouts if relation(x, self.energy.sizes) == x]
        places = [*((x, x) for x in allowed), self._now(node)]
        if not staying and len(layouts) <= self.most_in_two:
            pairs = itertools.product(allowed, layouts)
            places += [(x, y) for x, y in pairs if y not in allowed or self._pays(node, x, y)]
        self._new(node, dict.fromkeys(places))
        here, own = self._value(node)
        costs = self._read(states, own.homes, source, staying)
        self.problem.add((at, here), self.energy.shared(states.read(costs)))

    def _operation(self, node: fx.Node) -> None:
        options = self.choices.options[node]
        works = self.energy.works(node, options)
        if may_be_off := node in self.alternatives.optional:
            works = self.energy.shared(np.append(works, 0.0))
        at = self.of_option[node] = self.problem.variable(works)
        operands, (ins, outs) = Call.of(node).operands, columns(options)
        for k, operand in enumerate(operands):
            carry = node.target in (again, leave) and k == len(operands) - 1
            # Of a stack, rows are moved: to move it as a whole would take the memory of all.
            fixed = carry or node.target is row or operand in self.choices.staying
            source, states = self._value(operand)
            costs = self._read(states, ins[k], operand, fixed)
            if may_be_off or not states.plain:
                costs = self.energy.shared(states.read(costs, may_be_off))
            self.problem.add((source, at), costs)
        for i, value in values_of(node).items():
            self._computed(value, at, outs[i], may_be_off)

    def _computed(
        self, node: fx.Node, at: int, outs: tuple[Layout, ...], may_be_off: bool
    ) -> None:
        """A value that the options of an operation compute in some layouts."""
        value, fixed = self.alternatives.value(node), source_of(node).target in CARRIES
        fixed = fixed or node in self.choices.staying
        if value not in self.of_value:
            self._new(value, self._places(value, fixed))
        here, states = self._value(node)
        costs = self._table(outs, states.homes, node, fixed)
        if may_be_off:
            costs = self.energy.shared(states.computed(costs, self._version(node)))
        self.problem.add((at, here), costs)

    def _places(self, value: fx.Node, fixed: bool) -> list[Place]:
        """Where a value may be: in one layout, or in two if moves either way send."""
        layouts = self.choices.layouts[value]
        versions = self.alternatives.versions.get(value, (value,))
        single = [*dict.fromkeys([*((x, x) for x in layouts), self._now(value)])]
        if fixed or not self.given.on or sum(len(v.users) for v in versions) < 2:
            return single
        if len(layouts) > self.most_in_two:
            return single
        pairs = itertools.permutations(layouts, 2)
        return [*dict.fromkeys(single + [pair for pair in pairs if self._pays(value, *pair)])]

    def _now(self, value: fx.Node) -> Place:
        home = self.choices.now.home[value]
        return home, self.choices.now.kept.get(value, home)

    def _pays(self, value: fx.Node, home: Layout, kept: Layout) -> bool:
        """Whether a value may be kept in a second layout: where it is whole, others are parts of it."""
        if kept.pending or home.varying != kept.varying:
            return False
        return min(self._move(value, home, kept), self._move(value, kept, home)) > _FREE

    def _read(
        self, states: States, wanted: tuple[Layout, ...], value: fx.Node, equal: bool = False
    ) -> Table:
        """The cost of reading a value in some layouts, by its place."""
        costs = self._table(states.homes, wanted, value, equal)
        if states.kept == states.homes:
            return costs
        return np.minimum(costs, self._table(states.kept, wanted, value, equal))

    def _table(
        self, have: tuple[Layout, ...], want: tuple[Layout, ...], value: fx.Node, equal: bool
    ) -> Table:
        return _equal(have, want) if equal else self.table(have, want, *_element(value))

    def _version(self, node: fx.Node) -> int:
        value = self.alternatives.value(node)
        return self.alternatives.versions.get(value, (value,)).index(node)

    def _output(self, i: int, value: fx.Node) -> None:
        self._read_as(value, self.choices.now.outputs[i])

    def _read_as(self, node: fx.Node, wanted: Layout) -> None:
        at, states = self._value(node)
        costs = states.read(self._read(states, (wanted,), node))[:, 0]
        self.problem.add((at,), self.energy.shared(costs))

    # -- decisions --------------------------------------------------------------------------------

    def states(self) -> list[int]:
        """The states of the decision that is improved."""
        now, found = self.choices.now, [0] * len(self.problem.sizes)
        on = self.alternatives.on(self.graph, now.taken)
        for node, at in self.of_option.items():
            if node not in on and node in self.alternatives.optional:
                found[at] = self.problem.sizes[at] - 1
        for node, at in self.of_value.items():
            taken, states = now.taken.get(node, node), self.states_of[node]
            if taken in on or not states.may_be_off:
                home = states.homes[0] if node in self.given.inputs else now.home[node]
                place = home, now.kept.get(node, home)
                found[at] = states.index(place, self._version(taken))
            else:
                found[at] = states.count - 1
        return found

    def decision(self, states: list[int]) -> LayoutDecision:
        """The decision of a solution; what is off stays as it was."""
        now = self.choices.now
        made = LayoutDecision(option={**now.option}, raw={**now.raw}, home={**now.home})
        made.outputs = now.outputs
        for node, at in self.of_option.items():
            if states[at] < len(self.choices.options[node]):
                option = made.option[node] = self.choices.options[node][states[at]]
                made.raw[node] = option.outs
        for value, at in self.of_value.items():
            known = self.states_of[value]
            if (place := known.place(states[at])) is None:
                continue
            versions = self.alternatives.versions.get(value, (value,))
            taken = versions[known.version(states[at])]
            made.home |= dict.fromkeys(versions, place[0])
            if place[0] != place[1]:
                made.kept[value] = place[1]
            if taken is not value:
                made.taken[value] = taken
        return made

    def plan_others(self, made: LayoutDecision, states: list[int]) -> None:
        """Plan versions that a decision does not take, as if they were taken and all else stayed."""
        kept = [[state] for state in states]
        for node, at in self.of_option.items():
            if node in self.alternatives.optional:
                kept[at] = [*range(self.problem.sizes[at])]
        for value, at in self.of_value.items():
            known = self.states_of[value]
            if known.may_be_off:
                kept[at] = [*range(known.count)]
            elif known.versions > 1 and not made.home[value].pending:
                kept[at] = known.other_versions(states[at])
        try:
            cost, found = restricted(self.problem, kept)
        except TooWide:
            return
        if np.isinf(cost):
            return
        planned = self.decision(found)
        for node, at in self.of_option.items():
            if states[at] == len(self.choices.options[node]) != found[at]:
                made.option[node], made.raw[node] = planned.option[node], planned.raw[node]
        for value, at in self.of_value.items():
            if self.states_of[value].place(states[at]) is None:
                versions = self.alternatives.versions.get(value, (value,))
                made.home |= dict.fromkeys(versions, planned.home[value])


def link_within(cost: Cost, machine: Machine) -> Link:
    """The link by which an operation itself sends, such as its neighbours' elements."""
    return machine.link_of(cost.over, "all_to_all")


def _element(node: fx.Node) -> tuple[int, int]:
    """The bytes of an element of a value, and how often it is computed."""
    return VAL.of(node).dtype.itemsize, times(node)


@functools.lru_cache(maxsize=4096)
def _equal(have: tuple[Layout, ...], want: tuple[Layout, ...]) -> Table:
    """Nothing where two layouts are equal, else infinite."""
    each = np.array([[h == w for w in want] for h in have], dtype=bool)
    return np.where(each.reshape(len(have), len(want)), 0.0, np.inf)
