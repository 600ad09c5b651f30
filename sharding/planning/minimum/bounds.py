"""A minimum where exact elimination is too wide: near it, with a lower bound that says how near.

First, variables with few neighbours are eliminated, which is exact. Of the rest, the bound is the dual of
the linear relaxation, by sequential tree-reweighted messages (TRW-S: Kolmogorov, "Convergent
Tree-Reweighted Message Passing for Energy Minimization", PAMI 2006). At any time the messages give
- a solution: each variable, from the last, in the state that costs least beside those after it;
- a bound: each variable's costs are dealt out to its terms, and each term costs at least its minimum;
- what a state costs at least beside the best one of its variable. If that is more than the difference
  between solution and bound, the state is in no better solution (reduced-cost fixing). The minimum is
  among the other states, which soon are so few that it is found exactly.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import numpy as np

from torchard.sharding.planning.minimum.elimination import (
    LARGEST,
    Elimination,
    Table,
    Terms,
    TooWide,
    minimum,
)

__all__ = ["Bounded", "SweepBudget", "restricted", "solved"]

_EACH = 10  # sweeps between two bounds
_RISES = 1e-4  # of itself: where the bound rises by less from one to the next, the search ends
_SHARE = 0.4  # of what is left of the budget, for one bound
_FEWER = 0.95  # of the states: where more are left than that, no new search is tried
_QUICKLY = 200_000  # entries of a table
_NEIGHBOURS = 2  # of a variable that is eliminated exactly: what is left has terms of two variables
_SMALL = 2500  # entries of a term
_SMALLEST_PART = 1e-6  # of the difference: states that cost no more beside the best are equal to it
_ROUNDING = 1e-12  # of the sum of all terms


class SweepBudget:
    """The work that bounds of one program may take, in messages of small terms, each of which takes 4 µs.

    By default it takes at most three seconds, however large a program is.
    """

    def __init__(self, left: int = 800_000) -> None:
        self.left = left


class Bounded(NamedTuple):
    """States of all variables, what they cost, and what all states cost at least."""

    cost: float
    states: list[int]
    bound: float


def solved(
    problem: Terms,
    budget: SweepBudget,
    known: list[int] | None = None,
    largest: int = LARGEST,
) -> Bounded:
    """The minimum, or a solution near it.

    Args:
        known: a solution, than which none is returned that costs more.
        largest: entries of a table: where more are needed, elimination is too wide.

    Raises:
        TooWide: too little of the budget is left.
    """
    try:
        cost, states = minimum(problem, largest)
        return Bounded(cost, states, cost)
    except TooWide:
        chains = Elimination(problem, most=_NEIGHBOURS)
    known = None if known is None else [known[v] for v in chains.left]
    cost, states, bound = _near(chains.rest, budget, known, largest)
    return Bounded(chains.value + cost, chains.states(states), chains.value + bound)


def _near(
    problem: Terms, budget: SweepBudget, known: list[int] | None, largest: int
) -> Bounded:
    near = Bounded(np.inf, [], -np.inf)
    if known is not None:
        near = Bounded(problem.cost(known), known, -np.inf)
    dual, before, fewest = _Dual(problem, near.cost), -np.inf, sum(problem.sizes)
    work = _EACH * dual.work
    least = max(min(budget.left * (1 - _SHARE), budget.left - work), 0)
    while dual.bound - before > _RISES * abs(dual.bound) or before == -np.inf:
        if budget.left - work < least:
            break
        budget.left -= work
        before = dual.bound
        dual.improve(_EACH)
        states = dual.solution()
        if (cost := problem.cost(states)) < near.cost or not near.states:
            near = Bounded(cost, states, -np.inf)
        kept = dual.within(near)
        if (count := sum(map(len, kept))) > _FEWER * fewest:
            continue
        fewest = count
        with contextlib.suppress(TooWide):
            cost, states = restricted(problem, kept, min(largest, _QUICKLY))
            return Bounded(cost, states, cost)
    if not dual.excess:
        raise TooWide
    return _among_the_best(problem, dual, near, largest)


def _among_the_best(problem: Terms, dual: _Dual, near: Bounded, largest: int) -> Bounded:
    """The best solution among states of little excess, of as many as may be searched."""
    part = 1.0
    while part > _SMALLEST_PART:
        with contextlib.suppress(TooWide):
            cost, states = restricted(problem, dual.within(near, part), largest)
            found = Bounded(cost, states, dual.bound if part < 1.0 else cost)
            return found if cost < near.cost or part == 1.0 else near._replace(bound=dual.bound)
        part /= 2
    return near._replace(bound=dual.bound)


def restricted(
    problem: Terms, kept: list[list[int]], largest: int = LARGEST
) -> tuple[float, list[int]]:
    """The minimum over some states of each variable.

    Raises:
        TooWide: a table would be too large.
    """
    part, tables = Terms(), dict[object, Table]()
    part.sizes = [len(states) for states in kept]
    for scope, table in problem.terms:
        some = [kept[v] for v in scope]
        key = id(table), tuple(map(tuple, some))
        if key not in tables:
            tables[key] = table[np.ix_(*some)]
        part.add(scope, tables[key])
    cost, states = minimum(part, largest)
    return cost, [kept[v][state] for v, state in enumerate(states)]


def _sum_of_largest(problem: Terms) -> float:
    return sum(float(t[np.isfinite(t)].max(initial=0.0)) for _, t in problem.terms) or 1.0


class _Dual:
    """Messages between variables: how much of its costs each has handed to its neighbours.

    Args:
        most: what a solution costs: no term of a better one costs more.

    Attributes:
        work: of a sweep, in messages of small terms.
        bound: no solution costs less.
        excess: for each variable, what its states cost at least beside the best one.
    """

    def __init__(self, problem: Terms, most: float) -> None:
        own = [np.zeros(size) for size in problem.sizes]
        # In the place of infinity: of a much larger number, rounding would leave nothing of a cost.
        self.most = min(most, _sum_of_largest(problem))
        pairs: dict[tuple[int, int], Table] = {}
        for scope, table in problem.terms:
            finite = np.minimum(table, self.most)
            if len(scope) == 1:
                own[scope[0]] += finite
            else:
                a, b = sorted(scope)
                finite = finite if scope == (a, b) else finite.T
                pairs[a, b] = pairs[a, b] + finite if (a, b) in pairs else finite
        self.own = own
        self.costs = [x.copy() for x in own]  # with what all neighbours have handed
        self.after: list[list[tuple[int, Table]]] = [[] for _ in own]
        self.before: list[list[tuple[int, Table]]] = [[] for _ in own]
        self.handed: dict[tuple[int, int], Table] = {}
        for (a, b), table in pairs.items():
            self.after[a].append((b, table))
            self.before[b].append((a, np.ascontiguousarray(table.T)))
            self.handed[a, b], self.handed[b, a] = np.zeros(len(own[b])), np.zeros(len(own[a]))
        near = [*zip(self.after, self.before, strict=True)]
        self.share = [1 / max(len(after), len(before), 1) for after, before in near]
        self.degree = [len(after) + len(before) for after, before in near]
        self.work = 2 * sum(1 + table.size // _SMALL for table in pairs.values())
        self.bound = -np.inf
        self.excess: list[Table] = []

    def improve(self, sweeps: int) -> None:
        """Hand on costs, along the order of variables and back, and raise the bound."""
        for _ in range(sweeps):
            for a, after in enumerate(self.after):
                self._hand(a, after)
            for a in reversed(range(len(self.before))):
                self._hand(a, self.before[a])
        self._certify()

    def _hand(self, a: int, near: list[tuple[int, Table]]) -> None:
        part = self.share[a] * self.costs[a]
        for b, table in near:
            new = (table + (part - self.handed[b, a])[:, None]).min(0)
            new -= new.min()
            self.costs[b] += new - self.handed[a, b]
            self.handed[a, b] = new

    def _certify(self) -> None:
        """The bound, if each variable gives each of its terms an equal part of its costs."""
        parts = [x / max(n, 1) for x, n in zip(self.costs, self.degree, strict=True)]
        excess, bound = [np.zeros(len(x)) for x in self.own], 0.0
        for a, after in enumerate(self.after):
            if not self.degree[a]:
                excess[a], bound = self.own[a] - self.own[a].min(), bound + float(self.own[a].min())
            for b, table in after:
                to_a, to_b = parts[a] - self.handed[b, a], parts[b] - self.handed[a, b]
                costs = table + to_a[:, None] + to_b
                least = float(costs.min())
                bound += least
                excess[a] += costs.min(1) - least
                excess[b] += costs.min(0) - least
        if bound > self.bound:
            self.bound, self.excess = bound, excess

    def solution(self) -> list[int]:
        """Each variable, from the last, in the state that costs least beside those after it."""
        states = [0] * len(self.own)
        for a in reversed(range(len(self.own))):
            costs = self.own[a].copy()
            for b, table in self.after[a]:
                costs += table[:, states[b]]
            for b, _ in self.before[a]:
                costs += self.handed[b, a]
            states[a] = int(costs.argmin())
        return states

    def within(self, near: Bounded, part: float = 1.0) -> list[list[int]]:
        """The states of each variable in a solution, and all that may be in one of a smaller cost.

        Args:
            part: of the difference to the bound that states may cost beside the best.
        """
        most = min(near.cost, self.most)  # of a solution that is allowed at all
        gap = part * (most - self.bound) + _ROUNDING * self.most
        kept = [x <= gap for x in self.excess]
        for some, state in zip(kept, near.states, strict=True):
            some[state] = True
        return [np.flatnonzero(some).tolist() for some in kept]
