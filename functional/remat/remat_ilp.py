"""The integer program behind a budget: what to keep, so that the least is made again.

Time is cut into buckets, runs of the forward and runs of the backward. The results of an operation v of
the forward are kept (s_v = 1) or made again: e_vk says that they have been by bucket k of the backward.
What is kept is alive until its last reader; x_vk says that it still is in bucket k, when the backward has
read it for the last time, since a version is made of it then or later. What is made again is alive until
the backward reads it last, and in the bucket in which it is made.

    minimise   the FLOPs of what is made again
    such that  s_v + e_vk >= 1              if the backward reads v in bucket k
               s_u + e_uk >= e_vk           if making v reads u
               e_vk >= e_v(k-1)
               x_uk >= s_u + e_vK - e_v(k-1) - 1
               base_k + bytes of what is alive in k <= bound

Solved by HiGHS through scipy, without a limit of time, so that every rank finds the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["Problem", "Solution", "solve"]

_GAP = 0.02  # how far from the best a solution may be, by its FLOPs
_NODES = 50  # of the search tree

# One inequality: coefficients by variable, and what their sum is at least.
ConstraintRow = tuple[dict[int, float], float]


@dataclass(frozen=True)
class Solution:
    """Which operations' results are kept, and what the program takes for the peak."""

    kept: list[int]
    estimate: float


@dataclass
class Problem:
    """What there is to choose from; operations are numbers, in the order they run in.

    Attributes:
        costs: of each operation, the FLOPs of running it again.
        sizes: of each, the bytes of its results.
        sources: of each, the operations whose results it reads.
        reads: of each, the buckets in which the backward reads its results.
        forced: operations that are never run again.
        base: of each bucket of the backward, the most bytes that are alive besides.
        before: the same, but for what the operations of the bucket make themselves: what is alive when
            versions are made for them.
        ahead: for each bucket of the forward, the most bytes that are alive in it whatever is kept, and
            the operations before it whose results are alive only if they are.
        passing: whether to count what only other versions read. All of a bucket's are counted as if they
            were alive at once, which may be too much.
    """

    costs: list[int]
    sizes: list[int]
    sources: list[list[int]]
    reads: list[set[int]]
    forced: set[int]
    base: list[int]
    before: list[int]
    ahead: list[tuple[int, list[int]]]
    passing: bool = True

    @property
    def least(self) -> int:
        """No peak is lower."""
        return int(self.fixed.max())

    @property
    def most(self) -> int:
        """No peak is higher."""
        return self.least + sum(self.sizes)

    @cached_property
    def until(self) -> list[int]:
        """Of each operation, the bucket in which the backward reads its results last; -1 for never."""
        return [max(reads, default=-1) for reads in self.reads]

    @cached_property
    def spans(self) -> list[range]:
        """Of each operation, the buckets in which its results may be read, by versions too."""
        first = [min(reads, default=len(self.base)) for reads in self.reads]
        last = list(self.until)
        for v in reversed(range(len(self.sizes))):
            for u in self.sources[v]:
                first[u], last[u] = min(first[u], first[v]), max(last[u], last[v])
        return [range(a, b + 1) for a, b in zip(first, last, strict=True)]

    @cached_property
    def made(self) -> list[dict[int, int]]:
        """Of each operation, the variable e_vk by bucket k; those before them are s_v."""
        return _columns(len(self.sizes), self.spans)

    @cached_property
    def lingering(self) -> list[dict[int, int]]:
        """Of each operation, the variable x_vk by bucket k."""
        start = len(self.sizes) + sum(map(len, self.spans))
        return _columns(
            start,
            [range(last + 1, span.stop) for last, span in zip(self.until, self.spans, strict=True)],
        )

    @property
    def variables(self) -> int:
        return len(self.sizes) + sum(map(len, (*self.made, *self.lingering)))

    def rules(self) -> Iterator[ConstraintRow]:
        """All inequalities but those of memory."""
        e = self.made
        for v, span in enumerate(self.spans):
            for k in self.reads[v]:
                yield {v: 1.0, e[v][k]: 1.0}, 1.0
            for k in span[1:]:
                yield {e[v][k]: 1.0, e[v][k - 1]: -1.0}, 0.0
            for u in self.sources[v]:
                for k in span:
                    yield {u: 1.0, e[u][k]: 1.0, e[v][k]: -1.0}, 0.0
                for k, x in self.lingering[u].items():
                    if k < span.stop:
                        earlier = {e[v][k - 1]: 1.0} if k - 1 in e[v] else {}
                        yield {x: 1.0, u: -1.0, e[v][span[-1]]: -1.0, **earlier}, -1.0

    def alive(self) -> Iterator[dict[int, float]]:
        """The bytes that each variable adds: in the forward, in the backward, while versions are made."""
        for _, kept in self.ahead:
            yield {v: self.sizes[v] for v in kept}
        read: list[dict[int, float]] = [{} for _ in self.base]
        made: list[dict[int, float]] = [{} for _ in self.base]
        for v, size in enumerate(self.sizes):
            e, last = self.made[v], self.until[v]
            here = [(k, v) for k in range(last + 1)] + list(self.lingering[v].items())
            here += [(k, e[k]) for k in self.spans[v] if k <= last]
            for k, variable in here:
                read[k][variable] = made[k][variable] = size
            for k in self.spans[v]:
                if self.passing and k > last:  # made, read by another version and gone
                    made[k][e[k]] = size
                    if k - 1 in e:
                        made[k][e[k - 1]] = -size
        yield from (*read, *made)

    @cached_property
    def fixed(self) -> np.ndarray[Any, Any]:
        """For each of these, the bytes that are alive whatever is chosen."""
        return np.array([*(size for size, _ in self.ahead), *self.base, *self.before])

    @cached_property
    def matrices(self) -> tuple[Any, np.ndarray[Any, Any], Any]:
        """The rules as a sparse matrix and its right side, and the matrix of bytes."""
        rows = list(self.rules())
        right = np.array([bound for _, bound in rows])
        return self._sparse([row for row, _ in rows]), right, self._sparse(list(self.alive()))

    def _sparse(self, rows: Sequence[dict[int, float]]) -> Any:
        from scipy.sparse import csr_array

        entries = [(i, j, value) for i, row in enumerate(rows) for j, value in row.items()]
        i, j, values = zip(*entries, strict=True) if entries else ((), (), ())
        return csr_array((values, (i, j)), shape=(len(rows), self.variables))


def _columns(start: int, spans: Sequence[range]) -> list[dict[int, int]]:
    """Numbers for variables, one for each bucket of each span."""
    found = []
    for span in spans:
        found.append({k: start + i for i, k in enumerate(span)})
        start += len(span)
    return found


def solve(problem: Problem, bound: float) -> Solution | None:
    """What to keep under a bound on the peak, in bytes; None if nothing fits.

    Raises:
        ModuleNotFoundError: scipy is not installed.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "policies.budget solves an integer program with scipy: pip install 'torchard[budget]'."
        ) from error
    count = len(problem.sizes)
    rules, right, alive = problem.matrices
    unit = max(problem.least, 1)  # numbers near one
    room = (bound - problem.fixed) / unit
    cost = np.zeros(problem.variables)
    cost[:count] = 1e-7 * np.array(problem.sizes) / unit  # of equals, what keeps less
    for v, made in enumerate(problem.made):
        if made:
            cost[max(made.values())] += problem.costs[v] / max(max(problem.costs), 1)
    upper = np.ones(problem.variables)
    for v in problem.forced:
        upper[list(problem.made[v].values())] = 0
    found = milp(
        cost,
        integrality=np.ones(problem.variables),
        bounds=Bounds(0, upper),
        constraints=[
            LinearConstraint(rules, right, np.inf),
            LinearConstraint(alive / unit, -np.inf, room),
        ],
        options={"mip_rel_gap": _GAP, "node_limit": _NODES},
    )
    if found.x is None:
        return None
    held = alive @ np.round(found.x) + problem.fixed
    return Solution([v for v in range(count) if found.x[v] > 0.5], float(held.max()))
