"""A plan among all plans of its operations, in the model by which plans are minimized."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
from torch import fx

from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import SOURCE
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.reshard import plan as steps_between
from torchard.sharding.planning.decision import LayoutDecision, Plan
from torchard.sharding.planning.minimum.alternatives import NONE
from torchard.sharding.planning.minimum.bounds import Bounded, SweepBudget, solved
from torchard.sharding.planning.minimum.choices import Choices
from torchard.sharding.planning.minimum.elimination import Table, Terms, TooWide
from torchard.sharding.planning.minimum.model import Energy, EnergyModel, Transfer
from torchard.sharding.planning.minimum.reshards import Reshards
from torchard.sharding.scheduling.explained.moves import (
    PlannedMove,
    PlannedTransfer,
    given_layouts,
    moves,
)

__all__ = ["ModelTerm", "PlanCosts", "PlanSpace"]

ModelTerm = tuple[tuple[int, ...], Table]
_OPTIONS = 400  # of an operation, and layouts of a value
_PLACES = 700  # of a value
_SWEEPS = 1_000_000  # of a small term: ten seconds
_EQUAL = 1e-6  # of a plan's seconds: where another plan gains less, the plan itself is meant


class PlanCosts:
    """What a plan costs in the model, on the machine that planned it.

    Attributes:
        energy: the model's terms, in which no layout has precedence.
        decision: the plan, with each input that is moved for several operations moved once.
    """

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        given = replace(
            plan.given, on=plan.given.on or plan.given.machine, outputs=plan.decision.outputs
        )
        self.plan, self.sizes = plan, sizes
        self.energy = Energy(plan.graph, given, sizes)
        self.energy.budget = SweepBudget(_SWEEPS)
        self._reshards = Reshards(sizes, self.energy.machine, sys.maxsize)  # of this plan: few
        self.decision = self._settled(plan.decision)

    def working(self, decision: LayoutDecision) -> float:
        """The seconds that the busiest rank computes, and sends within operations."""
        options = decision.option.items()
        return sum(float(self.energy.works(node, (option,))[0]) for node, option in options)

    def within(self, decision: LayoutDecision) -> Iterator[PlannedTransfer]:
        """What operations themselves send."""
        for node, option in decision.option.items():
            for sent in self.energy.sent(node, option):
                yield PlannedTransfer(sent, times(node), SOURCE.get(node) or "")

    def collectives(self, move: PlannedMove) -> Iterator[PlannedTransfer]:
        """What a move sends."""
        item, often, known = self.energy.element(move.value)
        for step in steps_between(move.have, move.want, self.sizes):
            if step.collective.sends:
                size = step.elements(self.sizes) * item
                link = self.energy.machine.link_of(step.axes, step.kind)
                calls = known.moves if step.reduction is None else known.sums
                seconds = calls * link.latency + size / link.bandwidth
                owner = move.value if step.reduction or not SOURCE.get(move.user) else move.user
                sent = Transfer(step.kind, step.axes, size, seconds)
                source = SOURCE.get(owner) or ""
                yield PlannedTransfer(sent, often * self._made(move), source, calls < 1)

    def _made(self, move: PlannedMove) -> int:
        """How often a move is made each time that its value is computed."""
        kept = move.user is move.value
        return self.energy.later.times(move.value, move.have, move.want) if kept else 1

    def moving(self, move: PlannedMove) -> float:
        """The seconds of a move, as often as it is made."""
        item, often, calls = self.energy.element(move.value)
        often *= self._made(move)
        return self._reshards.seconds(move.have, move.want, item, often, calls)

    def seconds(self, decision: LayoutDecision) -> float:
        """The seconds of a decision."""
        return self.working(decision) + sum(map(self.moving, self.moves(decision)))

    def moves(self, decision: LayoutDecision) -> Iterator[PlannedMove]:
        """The moves of a decision."""
        return moves(self.plan.graph, self.plan.given, decision, self.moving)

    def _settled(self, decision: LayoutDecision) -> LayoutDecision:
        """The decision in which inputs and constrained values are moved as is cheapest."""
        fixed = given_layouts(self.plan.given, decision)
        read: dict[fx.Node, list[PlannedMove]] = defaultdict(list)
        for move in self.moves(decision):
            if move.value in fixed and move.user is not move.value:
                read[move.value].append(move)
        kept = dict(decision.kept)
        for value, each in read.items():
            if value not in kept:
                ways = dict.fromkeys([fixed[value], *(m.want for m in each if not m.want.pending)])
                best = min(ways, key=lambda way: self._through(value, fixed[value], way, each))
                kept |= {value: best} if best != fixed[value] else {}
        return replace(decision, kept=kept)

    def _through(
        self, value: fx.Node, home: Layout, way: Layout, each: Iterable[PlannedMove]
    ) -> float:
        """The seconds in which a value is moved to a layout, and from the nearer one for its readers."""
        there = self.moving(PlannedMove(value, value, home, way))
        return there + sum(
            min(self.moving(move._replace(have=have)) for have in (home, way)) for move in each
        )


class PlanSpace:
    """All plans that differ from one along some axes; outputs have the layouts of that plan.

    Raises:
        TooWide: there are too many.

    Attributes:
        model: the model of these plans.
        states: the states of the plan.
        little: seconds that no difference between plans is worth.
    """

    def __init__(self, costs: PlanCosts, axes: tuple[str, ...]) -> None:
        plan, energy = costs.plan, costs.energy
        choices = Choices(
            plan.graph, energy.given, costs.sizes, axes, costs.decision, NONE, _OPTIONS
        )
        shared = [len(x) for v, x in choices.layouts.items() if len(v.users) > 1]
        if max(shared, default=0) ** 2 > _PLACES:  # a value may be in each two of them
            raise TooWide
        self.costs, self.axes = costs, axes
        self.model = EnergyModel(energy, choices, most_in_two=_OPTIONS, most_in_any_two=_OPTIONS)
        self.states = self._states(costs.decision)
        seconds = costs.seconds(costs.decision)
        self.little = _EQUAL * seconds
        penalty = self.little / max(len(self.states), 1)
        self._same = [self._others(v, state, penalty) for v, state in enumerate(self.states)]

    def _states(self, decision: LayoutDecision) -> list[int]:
        states = self.model.states()
        for node, at in self.model.of_option.items():
            chosen = decision.option[node]
            options = [(o.ins, o.outs) for o in self.model.choices.options[node]]
            states[at] = options.index((chosen.ins, chosen.outs))
        return states

    def _others(self, variable: int, state: int, penalty: float) -> ModelTerm:
        """A term for all states of a variable but one."""
        table = np.full(self.model.problem.sizes[variable], penalty)
        table[state] = 0.0
        return (variable,), self.costs.energy.shared(table)

    def proved(self) -> Bounded:
        """The cheapest of these plans and its seconds, or else the plan, and what each costs at least.

        Raises:
            TooWide: it takes too long to say.
        """
        return solved(self.model.problem, self.costs.energy.budget, self.states)

    def solved(self, *extra: ModelTerm) -> Bounded:
        """The cheapest plan, or one near it, with further terms; of equal ones, that most like the plan.

        Raises:
            TooWide: it takes too long to find.
        """
        problem, own = Terms(), self.model.problem
        problem.sizes = own.sizes
        problem.terms = [*own.terms, *extra, *self._same]
        found = solved(problem, self.costs.energy.budget)
        problem.terms = [*own.terms, *extra]
        return Bounded(problem.cost(found.states), found.states, found.bound)

    @cached_property
    def best(self) -> Bounded:
        """The cheapest plan, or one near it: not one that costs more than the plan itself."""
        found, seconds = self.solved(), self.model.problem.cost(self.states)
        return found if found.cost < seconds else Bounded(seconds, self.states, found.bound)
