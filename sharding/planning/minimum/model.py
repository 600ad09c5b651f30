"""The seconds of a plan as a sum of terms over the choices that it makes.

Variables are the option x_o of each operation o and the place y_v of each value v: a layout, or two, of
which each operation reads the nearer:

    Σ_o work(x_o) + Σ_(o → v) move(out_v(x_o), y_v) + Σ_(v → o) move(y_v, in_v(x_o))

work is the time of the busiest rank, move that of the cheapest reshard (`layouts/reshard.py`): its bytes
by the bandwidth of its axes, and a latency for each collective. What is in a loop counts as often as it
runs. Inputs, constraints and specs of outputs fix layouts; other outputs are as computed, with sums
completed. A carry has one layout, and a cotangent that of its output. An operation that comes apart
stands beside its decomposition (`alternatives.py`): v's state also says which of them computes it, and
x_o may be off.

Of later passes the sum knows that a backward gathers parameters again, and that gathers of parameters and
sums of gradients are merged, so that each has a part of a latency (`later_passes.py`).

Not in the sum: that a value which several operations read in one third layout is moved once, that a view
is moved by its base, and that other collectives are merged.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

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
    index_of,
    source_of,
    values_of,
)
from torchard.sharding.planning.minimum.bounds import SweepBudget, restricted
from torchard.sharding.planning.minimum.choices import CARRIES, Choices, columns
from torchard.sharding.planning.minimum.elimination import Table, Terms, TooWide
from torchard.sharding.planning.minimum.later_passes import LaterPasses
from torchard.sharding.planning.minimum.reshards import Calls, Reshards
from torchard.sharding.rules import Call

__all__ = ["IN_TWO", "Energy", "EnergyModel", "Transfer", "link_within"]

_SMALLEST = 1e-16  # seconds of a byte that a rank keeps: of equal plans, the smallest is chosen
_EARLY = 1e-15  # seconds of a sum completed before it must be: late ones are merged
_FREE = 1e-11  # seconds of a move that sends nothing
_RESHARDS, _FEW_RESHARDS = 40_000, 4000  # pairs of layouts, on a given machine and without one
IN_TWO = 12  # layouts of a value that may be in two
_IN_ANY_TWO = 6  # layouts of a value that may be in each two of them: about as many places
_OPTIONS = 64  # of an operation along one axis, and layouts of a value


class Transfer(NamedTuple):
    """What a rank sends by one collective, and the seconds that are counted for it."""

    kind: str
    axes: tuple[str, ...]
    bytes: float
    seconds: float


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
        self.later = LaterPasses(graph, given)
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
        rate, item = seconds_per_point(node, self.machine), _itemsize(node)
        local = self.given.local.get(node)
        key = options, rate, item, times(node), local
        if key not in self._works:
            costs = [o.cost(self.sizes) for o in options]
            moved = np.array([sum(s.seconds for s in self.sent(node, o)) for o in options])
            kept = np.array([c.work * rate + c.volume * item * _SMALLEST for c in costs])
            if self.given.on:
                kept += [_EARLY * bool(o.rule.linear and not o.passed) for o in options]
            self._works[key] = moved * times(node) + kept
        return self._works[key]

    def element(self, value: fx.Node) -> tuple[int, int, Calls]:
        """The bytes of an element of a value, how often it is computed, and the calls of a move."""
        return VAL.of(value).dtype.itemsize, times(value), self.later.calls(value)

    def sent(self, node: fx.Node, option: Option) -> Iterator[Transfer]:
        """What an operation itself sends: elements of its neighbours, or a collective of a shard_map."""
        cost, local, item = option.cost(self.sizes), self.given.local.get(node), _itemsize(node)
        if cost.exchanged:
            link, size = link_within(cost, self.machine), float(cost.exchanged * item)
            yield Transfer("all_to_all", cost.over, size, link.seconds(size))
        collective = None if local is None or local.move is None else local.move.collective
        if collective is not None and collective.sends:
            table = dict(self.sizes)
            ranks = math.prod(table[axis] for axis in collective.axes)
            before, after = (x.largest_local(table) for x in (*option.ins[:1], *option.outs[:1]))
            link = self.machine.link_of(collective.axes, collective.kind)
            size = collective.elements(before, after, ranks) * item
            if ranks > 1:
                yield Transfer(collective.kind, collective.axes, size, link.seconds(size))

    def shared(self, table: Table) -> Table:
        """The table; equal ones are one object."""
        return self._tables.setdefault((table.shape, table.tobytes()), table)


def _itemsize(node: fx.Node) -> int:
    val = VAL.of(node)
    return val.dtype.itemsize if hasattr(val, "dtype") else 4


class EnergyModel:
    """The problem of one program along some axes.

    Args:
        most_in_two: values of more layouts are in two at once only where they are so already.
        most_in_any_two: of values of more layouts, one of the two is where the value is now.
    """

    def __init__(
        self,
        energy: Energy,
        choices: Choices,
        most_in_two: int = IN_TWO,
        most_in_any_two: int = _IN_ANY_TWO,
    ) -> None:
        self.energy, self.choices = energy, choices
        self.most_in_two, self.most_in_any_two = most_in_two, most_in_any_two
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
        again = self.energy.later.times
        moves = [self._move(value, *place) * again(value, *place) for place in states.places]
        costs = np.array([*moves * versions, *[0.0] * may_be_off])
        self.of_value[value] = self.problem.variable(self.energy.shared(costs))

    def _move(self, value: fx.Node, have: Layout, want: Layout) -> float:
        if have is want:
            return 0.0
        return self.energy.reshards.seconds(have, want, *self.energy.element(value))

    def _input(self, node: fx.Node) -> None:
        """An input, or a cotangent, which has the layout of its output."""
        known = self.given.inputs[node]
        if isinstance(known, tuple):
            self._given(node, known[0])
        elif (fixed := self.given.outputs[known]) is not None:
            self._given(node, fixed)
        else:
            layouts = [self.choices.now.outputs[known], *self.choices.layouts[node]]
            self._new(node, dict.fromkeys((x, x) for x in layouts if not x.awaited))

    def _fixed(self, node: fx.Node) -> None:
        fixed = self.given.constraints[node]
        self._given(node, fixed)
        self._read_as(node.all_input_nodes[0], fixed)

    def _given(self, node: fx.Node, home: Layout) -> None:
        """A value whose layout is given: all that read it in another one may share one move."""
        staying = node in self.choices.staying
        others = [] if staying else [x for x in self.choices.layouts[node] if not x.awaited]
        self._new(node, dict.fromkeys([(home, home), *((home, x) for x in others)]))

    def _related(self, node: fx.Node) -> None:
        """A value that is read in any of the layouts that are allowed, and may be moved from there."""
        (source,) = node.all_input_nodes
        at, states = self._value(source)
        staying, relation = node in self.choices.staying, self.given.relative[node]
        layouts = [x for x in self.choices.layouts[node] if not x.awaited]
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
        if self.energy.later.makes_again(node):
            again = self.energy.later.times
            costs = costs * np.array([[again(node, x, y) for y in states.homes] for x in outs])
        if may_be_off:
            costs = states.computed(costs, self._version(node))
        self.problem.add((at, here), self.energy.shared(costs))

    def _places(self, value: fx.Node, fixed: bool) -> list[Place]:
        """Where a value may be: in one layout, or in two if moves either way send."""
        layouts = self.choices.layouts[value]
        versions = self.alternatives.versions.get(value, (value,))
        single = [*dict.fromkeys([*((x, x) for x in layouts), self._now(value)])]
        if fixed or sum(len(v.users) for v in versions) < 2:
            return single
        if len(layouts) > self.most_in_two:
            return single
        home, _ = self._now(value)
        pairs = [
            pair
            for pair in itertools.permutations(layouts, 2)
            if len(layouts) <= self.most_in_any_two or home in pair
        ]
        return [*dict.fromkeys(single + [pair for pair in pairs if self._pays(value, *pair)])]

    def _now(self, value: fx.Node) -> Place:
        home = self.choices.now.home[value]
        return home, self.choices.now.kept.get(value, home)

    def _pays(self, value: fx.Node, home: Layout, kept: Layout) -> bool:
        """Whether a value may be kept in a second layout: where it is whole, others are parts of it."""
        if kept.awaited or home.varying != kept.varying:
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
        return _equal(have, want) if equal else self.table(have, want, *self.energy.element(value))

    def _version(self, node: fx.Node) -> int:
        value = self.alternatives.value(node)
        return self.alternatives.versions.get(value, (value,)).index(node)

    def _output(self, i: int, value: fx.Node) -> None:
        """An output, and the cotangent that has its layout."""
        fixed = self.given.outputs[i]
        if fixed is not None:
            self._read_as(value, fixed)
            return
        at, states = self._value(value)
        value = self.alternatives.value(value)
        if source_of(value) not in self.of_option:
            return self._passed(i, at, states)
        for version in self.alternatives.versions.get(value, (value,)):
            self._open(i, version)

    def _passed(self, i: int, at: int, states: States) -> None:
        """An open output that is an input or a constraint, and stays at home."""
        for cotangent in self.choices.cotangents.get(i, ()):
            here, own = self._value(cotangent)
            self.problem.add((at, here), _equal(states.homes, own.homes))

    def _open(self, i: int, value: fx.Node) -> None:
        """An open output: what is computed has its layout, but for sums, which are completed."""
        source, (at, states) = source_of(value), self._value(value)
        made, off = self.of_option[source], source in self.alternatives.optional
        outs = columns(self.choices.options[source])[1][index_of(value)]
        layouts = tuple([x.reduced() for x in outs])
        costs = states.read(self._read(states, layouts, value), off)
        self.problem.add((at, made), self.energy.shared(costs))
        for cotangent in self.choices.cotangents.get(i, ()):
            here, own = self._value(cotangent)
            costs = _equal(own.homes, layouts)
            if off:
                costs = np.pad(costs, ((0, 0), (0, 1)))
            self.problem.add((here, made), self.energy.shared(costs))

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
                home = self._now_home(node)
                place = home, now.kept.get(node, home)
                found[at] = states.index(place, self._version(taken))
            else:
                found[at] = states.count - 1
        return found

    def _now_home(self, node: fx.Node) -> Layout:
        known = self.given.inputs.get(node)
        if known is None:
            return self.choices.now.home[node]
        return self.choices.now.outputs[known] if isinstance(known, int) else known[0]

    def decision(self, states: list[int]) -> LayoutDecision:
        """The decision of a solution; what is off stays as it was."""
        now = self.choices.now
        made = LayoutDecision(option={**now.option}, raw={**now.raw}, home={**now.home})
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
        made.outputs = tuple(self._output_in(made, i) for i in range(len(self.outputs)))
        return made

    def _output_in(self, made: LayoutDecision, i: int) -> Layout:
        """The layout of an output in a decision; see `_open`."""
        fixed = self.given.outputs[i]
        if fixed is not None:
            return fixed
        value = self.alternatives.value(self.outputs[i])
        taken = made.taken.get(value, value)
        if (known := made.raw.get(source_of(taken))) is None:
            return made.home[value].reduced()
        return known[index_of(taken)].reduced()

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
            elif known.versions > 1 and not made.home[value].awaited:
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


@functools.lru_cache(maxsize=4096)
def _equal(have: tuple[Layout, ...], want: tuple[Layout, ...]) -> Table:
    """Nothing where two layouts are equal, else infinite."""
    each = np.array([[h == w for w in want] for h in have], dtype=bool)
    return np.where(each.reshape(len(have), len(want)), 0.0, np.inf)
