"""A minimum where exact elimination is too wide: near it, with a lower bound that says how near.

First, variables with few neighbours are eliminated, which is exact. Of the rest, the bound is the dual of
the linear relaxation, by block-coordinate ascent (MPLP: Globerson & Jaakkola,
"Fixing Max-Product", NIPS 2007): each term of two variables hands half of its smallest cost in each state
to either of them. What a state then costs at least, beside the best one of its variable, says which
states to keep: the cheapest few, a beam, give a solution, and with that all whose excess is at most the
difference between solution and bound, among which the minimum is (reduced-cost fixing).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from torchard.sharding.planning.minimum.elimination import (
    Elimination,
    Table,
    Terms,
    TooWide,
    minimum,
    order,
)

__all__ = ["Bounded", "SweepBudget", "proved", "restricted", "solved"]

_SWEEPS, _STALLS = 60, 1e-4
_FEW = 20  # sweeps: after fewer, a bound says little
_BEAMS = (8, 5, 3)  # states of each variable
_NEIGHBOURS = 2  # of a variable that is eliminated exactly: what is left has terms of two variables
_SMALL = 2500  # entries of a term
_ROUNDING = 1e-12  # of the sum of all terms


class SweepBudget:
    """The work that bounds of one program may take: how often a small term may hand on costs.

    It does so in 10 µs, so by default bounds take at most two seconds, however large a program is.
    """

    def __init__(self, left: int = 200_000) -> None:
        self.left = left


class Bounded(NamedTuple):
    """States of all variables, what they cost, and what all states cost at least."""

    cost: float
    states: list[int]
    bound: float


def solved(problem: Terms, budget: SweepBudget) -> Bounded:
    """The minimum, or a solution near it.

    Raises:
        TooWide: the smallest beam is too wide, or too little of the budget is left.
    """
    return _reduced(problem, lambda chains: _near(chains.rest, budget))


def _near(problem: Terms, budget: SweepBudget) -> Bounded:
    # A beam's width depends on its size alone, so it is known before a bound is.
    few = [min(size, _BEAMS[-1]) for size in problem.sizes]
    order(few, [scope for scope, _ in problem.terms])
    dual = _Dual(problem, budget)
    near = _within(problem, *(dual.cheapest(count) for count in _BEAMS))
    kept = dual.within(near)
    try:
        cost, states = restricted(problem, kept)
    except TooWide:
        return near._replace(bound=dual.bound)
    return Bounded(cost, states, cost)


def proved(problem: Terms, near: list[int], budget: SweepBudget) -> Bounded:
    """The minimum, or else the best solution known, with a bound that is raised as long as it rises.

    Args:
        near: a solution.

    Raises:
        TooWide: so little of the budget is left that there is no bound.
    """
    return _reduced(
        problem, lambda chains: _raised(chains.rest, [near[v] for v in chains.left], budget)
    )


def _reduced(problem: Terms, of_rest: Callable[[Elimination], Bounded]) -> Bounded:
    """The minimum, or what is found of the variables that are left when chains are eliminated."""
    try:
        cost, states = minimum(problem)
        return Bounded(cost, states, cost)
    except TooWide:
        chains = Elimination(problem, most=_NEIGHBOURS)
    cost, states, bound = of_rest(chains)
    return Bounded(chains.value + cost, chains.states(states), chains.value + bound)


def _raised(problem: Terms, known: list[int], budget: SweepBudget) -> Bounded:
    dual, before = _Dual(problem, budget), -np.inf
    near = Bounded(problem.cost(known), known, -np.inf)
    while dual.bound > before:
        with contextlib.suppress(TooWide):
            beams = (dual.cheapest(count) for count in _BEAMS)
            near = min(near, _within(problem, *beams), key=lambda found: found.cost)
        with contextlib.suppress(TooWide):
            cost, states = restricted(problem, dual.within(near))
            return Bounded(cost, states, cost)
        before = dual.bound
        with contextlib.suppress(TooWide):
            dual.ascend(budget, stalls=0.0)
    return near._replace(bound=dual.bound)


def _within(problem: Terms, *beams: list[list[int]]) -> Bounded:
    """The minimum in the first beam that is not too wide."""
    for beam in beams:
        try:
            cost, states = restricted(problem, beam)
        except TooWide:
            continue
        return Bounded(cost, states, -np.inf)
    raise TooWide


def restricted(problem: Terms, kept: list[list[int]]) -> tuple[float, list[int]]:
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
    cost, states = minimum(part)
    return cost, [kept[v][state] for v, state in enumerate(states)]


class _Dual:
    """The dual bound of a problem, and the least costs of states that it gives.

    Raises:
        TooWide: too little of the budget is left.

    Attributes:
        least: for each variable, what terms of others have handed to its states, with its own costs.
        bound: no solution costs less.
    """

    def __init__(self, problem: Terms, budget: SweepBudget) -> None:
        self.least = [np.zeros(size) for size in problem.sizes]
        # In the place of infinity: of a much larger number, rounding would leave nothing of a cost.
        self.most = sum(float(t[np.isfinite(t)].max(initial=0.0)) for _, t in problem.terms) or 1.0
        pairs: dict[tuple[int, int], Table] = {}
        for scope, table in problem.terms:
            finite = np.minimum(table, self.most)
            if len(scope) == 1:
                self.least[scope[0]] += finite
            elif scope in pairs or scope[::-1] not in pairs:
                pairs[scope[0], scope[1]] = pairs.get((scope[0], scope[1]), 0.0) + finite
            else:
                pairs[scope[1], scope[0]] = pairs[scope[1], scope[0]] + finite.T
        self.pairs = list(pairs.items())
        self.handed = [(np.zeros(len(t)), np.zeros(t.shape[1])) for _, t in self.pairs]
        self.bound = -np.inf
        self.ascend(budget)

    def ascend(self, budget: SweepBudget, stalls: float = _STALLS) -> None:
        """Raise the bound by some sweeps, as long as it rises by more than a part of itself."""
        each = list(range(len(self.pairs)))
        work = sum(1 + table.size // _SMALL for _, table in self.pairs)
        sweeps = min(_SWEEPS, budget.left // max(work, 1))
        if sweeps < _FEW:
            raise TooWide
        for _ in range(sweeps):
            budget.left -= work
            for i in each:
                self._hand(i)
            each.reverse()
            bound, before = self._bound(), self.bound
            self.bound = max(bound, before)
            if bound - before <= stalls * abs(bound):
                break

    def _hand(self, i: int) -> None:
        (a, b), table = self.pairs[i]
        to_a, to_b = self.handed[i]
        rest_a, rest_b = self.least[a] - to_a, self.least[b] - to_b
        joint = table + rest_a[:, None] + rest_b
        half_a, half_b = joint.min(1) / 2, joint.min(0) / 2
        self.handed[i] = half_a - rest_a, half_b - rest_b
        self.least[a], self.least[b] = half_a, half_b

    def _bound(self) -> float:
        rest = sum(
            float((table - to_a[:, None] - to_b).min())
            for (_, table), (to_a, to_b) in zip(self.pairs, self.handed, strict=True)
        )
        return rest + sum(float(x.min()) for x in self.least)

    def cheapest(self, count: int) -> list[list[int]]:
        """The states of each variable that may cost least, in order."""
        return [sorted(np.argsort(x, kind="stable")[:count].tolist()) for x in self.least]

    def within(self, near: Bounded) -> list[list[int]]:
        """The states of each variable in a solution, and all that may be in one of a smaller cost."""
        gap = near.cost - self.bound + _ROUNDING * self.most
        kept = [x - x.min() <= gap for x in self.least]
        for some, state in zip(kept, near.states, strict=True):
            some[state] = True
        return [np.flatnonzero(some).tolist() for some in kept]
