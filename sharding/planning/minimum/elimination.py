"""Exact minimization of a sum of terms over variables with finitely many states.

    minimize  Σ_v unary[v](x_v) + Σ_(u,v) pair[u, v](x_u, x_v)

A variable is eliminated by minimizing over its states the sum of all terms that it is in, which is a term
of its neighbours (Bertelè & Brioschi, "Nonserial Dynamic Programming", 1972; bucket elimination, Dechter
1999). The order is that of the smallest such sums, or that in which the fewest entries are added
(weighted min-fill: Kjaerulff, "Triangulation of Graphs", 1990). The work is exponential in the width of
the graph, which for programs does not grow with their depth. Equal terms are combined once: layers
repeat.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["LARGEST", "Elimination", "Table", "Terms", "TooWide", "minimum", "order"]

Table = npt.NDArray[np.float64]
LARGEST, _ALL = 4_000_000, 60_000_000  # entries of a table, and of all
_FEW = 1_000_000  # entries of a table: where that is enough, no other order is sought


class TooWide(Exception):
    """The elimination of a variable needs a table that is too large."""


class Terms:
    """Variables and the terms of their costs; a term is a table over the states of its variables.

    Tables are compared by identity: equal ones should be one object.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.terms: list[tuple[tuple[int, ...], Table]] = []
        self._narrow: dict[object, tuple[Table, Table]] = {}  # by tables' identities, with the tables

    def variable(self, unary: Table) -> int:
        """Add a variable, and return its number."""
        self.sizes.append(len(unary))
        self.terms.append(((len(self.sizes) - 1,), unary))
        return len(self.sizes) - 1

    def add(self, scope: tuple[int, ...], table: Table) -> None:
        """Add a term over some variables; those of one state are left out of it, if others are left."""
        assert table.shape == tuple(self.sizes[v] for v in scope)
        several = tuple([v for v in scope if self.sizes[v] > 1]) or scope[:1]
        if several != scope:
            shape = tuple(self.sizes[v] for v in several)
            narrow = self._narrow.setdefault((id(table), shape), (table, table.reshape(shape)))
            table = narrow[1]
        self.terms.append((several, table))

    def cost(self, states: Sequence[int]) -> float:
        """The sum of all terms in given states."""
        return float(sum(table[tuple(states[v] for v in scope)] for scope, table in self.terms))


class _Term(NamedTuple):
    scope: tuple[int, ...]
    table: Table


class _Step(NamedTuple):
    """One eliminated variable, and its best state by the states of its neighbours."""

    variable: int
    scope: tuple[int, ...]
    best: npt.NDArray[np.intp]


def minimum(problem: Terms, largest: int = LARGEST) -> tuple[float, list[int]]:
    """The smallest cost, and states that have it: of several, the first in order.

    Args:
        largest: entries of a table.

    Raises:
        TooWide: a table would be too large.
    """
    whole = Elimination(problem, largest=largest)
    return whole.value, whole.states(())


def order(
    sizes: Sequence[int],
    scopes: Collection[tuple[int, ...]],
    most: float = math.inf,
    largest: int = LARGEST,
) -> list[tuple[int, ...]]:
    """Each variable, when it is eliminated, with those that it then has terms with.

    Args:
        most: variables with more neighbours are not eliminated.
        largest: entries of a table.

    Raises:
        TooWide: a table would be too large.
    """
    found = _ordered(sizes, scopes, most, by_fill=False)
    if _largest(sizes, found) > _FEW:
        other = _ordered(sizes, scopes, most, by_fill=True)
        found = min(found, other, key=lambda each: _largest(sizes, each))
    if _largest(sizes, found) > largest:
        raise TooWide
    return found


def _largest(sizes: Sequence[int], scopes: Iterable[tuple[int, ...]]) -> int:
    return max((math.prod([sizes[v] for v in scope]) for scope in scopes), default=0)


def _ordered(
    sizes: Sequence[int], scopes: Iterable[tuple[int, ...]], most: float, by_fill: bool
) -> list[tuple[int, ...]]:
    """An order by the sizes of sums, or by those of the terms that they add (weighted min-fill)."""
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            near[v].update(u for u in scope if u != v)

    def weight(v: int) -> tuple[int, int]:
        each, added = [*near[v]], 0
        if by_fill:
            for i, a in enumerate(each):
                added += sizes[a] * sum([sizes[b] for b in each[:i] if b not in near[a]])
        return added, math.prod([sizes[u] for u in each], start=sizes[v])

    queue = [(weight(v), v) for v in range(len(sizes))]
    heapq.heapify(queue)
    found: dict[int, tuple[int, ...]] = {}
    while queue:
        before, v = heapq.heappop(queue)
        if v in found:
            continue
        if before != (now := weight(v)):
            heapq.heappush(queue, (now, v))
            continue
        if len(near[v]) > most:
            continue  # until a neighbour is eliminated
        found[v] = (v, *sorted(near[v]))
        for u in found[v][1:]:
            near[u] |= near[v]
            near[u].difference_update((u, v))
            heapq.heappush(queue, (weight(u), u))
    return list(found.values())


class Elimination:
    """All variables of a problem eliminated, or those with few neighbours.

    Args:
        most: variables with more neighbours are left.
        largest: entries of a table.

    Attributes:
        value: what the eliminated variables cost apart from the others.
        rest: the problem of the others.

    Raises:
        TooWide: a table would be too large.
    """

    def __init__(
        self, problem: Terms, most: float = math.inf, largest: int = LARGEST
    ) -> None:
        self.sizes = problem.sizes
        orders = order(problem.sizes, [scope for scope, _ in problem.terms], most, largest)
        self.terms = {i: _Term(*term) for i, term in enumerate(problem.terms)}
        self.of: list[set[int]] = [set() for _ in self.sizes]
        for i, term in self.terms.items():
            for v in term.scope:
                self.of[v].add(i)
        self.number = len(self.terms)
        # By tables' identities; the terms are kept with them, so that no identity is used again.
        self.known: dict[object, tuple[list[_Term], Table, npt.NDArray[np.intp]]] = {}
        self.value, self.entries = 0.0, 0
        self.steps = [self._eliminated(scope) for scope in orders]
        gone = {scope[0] for scope in orders}
        self.left = [v for v in range(len(self.sizes)) if v not in gone]
        at = {v: i for i, v in enumerate(self.left)}
        self.rest = Terms()
        self.rest.sizes = [self.sizes[v] for v in self.left]
        for term in self.terms.values():
            self.rest.add(tuple(at[v] for v in term.scope), term.table)

    def states(self, rest: Sequence[int]) -> list[int]:
        """The states of all variables that cost least, given those of the variables that are left."""
        states = [0] * len(self.sizes)
        for v, state in zip(self.left, rest, strict=True):
            states[v] = state
        for step in reversed(self.steps):
            states[step.variable] = int(step.best[tuple(states[u] for u in step.scope)])
        return states

    def _eliminated(self, scope: tuple[int, ...]) -> _Step:
        v = scope[0]
        terms = [self.terms.pop(i) for i in sorted(self.of[v])]
        for u in scope[1:]:
            self.of[u] -= self.of[v]
        at = {u: k for k, u in enumerate(scope)}
        places = tuple([tuple([at[u] for u in term.scope]) for term in terms])
        key = (len(scope), places, tuple([id(term.table) for term in terms]))
        if key not in self.known:
            shape = tuple(self.sizes[u] for u in scope)
            self.entries += math.prod(shape)
            if self.entries > _ALL:
                raise TooWide
            total = _total(shape, [t.table for t in terms], places)
            self.known[key] = terms, total.min(0), total.argmin(0)
        _, least, best = self.known[key]
        if len(scope) == 1:
            self.value += float(least)
        else:
            self.terms[self.number] = _Term(scope[1:], least)
            for u in scope[1:]:
                self.of[u].add(self.number)
            self.number += 1
        return _Step(v, scope[1:], best)


def _total(
    shape: tuple[int, ...], tables: Sequence[Table], places: Sequence[tuple[int, ...]]
) -> Table:
    """The sum of tables over a scope, each of which is over some of its variables."""
    total = np.zeros(shape)
    for table, place in zip(tables, places, strict=True):
        by_place = sorted(range(len(place)), key=place.__getitem__)
        wide = [1] * len(shape)
        for k in place:
            wide[k] = shape[k]
        total += table.transpose(by_place).reshape(wide)
    return total
