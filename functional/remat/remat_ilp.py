"""The integer program behind a budget: which values to keep, so that the fewest FLOPs are recomputed.

Time is divided into buckets of consecutive operations of the forward and of the backward. The results of
an operation v of the forward are kept (s_v = 1) or recomputed (e_vk = 1: by bucket k of the backward).
Kept values are alive until their last reader; x_vk = 1 says that v is still alive in bucket k, after the
backward's own last read, because a recomputation reads it then or later. Recomputed values are alive
until the backward's last read, and in the bucket in which they are recomputed. Of an operation in a loop,
what is kept is that of all iterations; what is recomputed is alive in one.

    minimise   the FLOPs of recomputation
    such that  s_v + e_vk >= 1              if the backward reads v in bucket k
               s_u + e_uk >= e_vk           if recomputing v reads u
               e_vk >= e_v(k-1)
               x_uk >= s_u + e_vK - e_v(k-1) - 1
               base_k + bytes alive in bucket k <= bound

Solved by HiGHS through scipy, without a time limit, so that every rank finds the same solution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

__all__ = ["Problem", "Solution", "solve"]

_GAP = 0.02  # the relative optimality gap, in FLOPs
_NODES = 1  # of the search tree: HiGHS finds good solutions at its root, and proofs take minutes

# One inequality: coefficients by variable, and the lower bound of their sum.
ConstraintRow = tuple[dict[int, float], float]


@dataclass(frozen=True)
class Solution:
    """The operations whose results are kept, and the peak that the integer program estimates."""

    kept: list[int]
    estimate: float


@dataclass
class Problem:
    """The operations to choose from, by number, in execution order.

    Attributes:
        costs: for each operation, the FLOPs of recomputing it, in all iterations of its loop.
        sizes: for each operation, the bytes of its results in one iteration.
        times: for each operation, how many iterations there are.
        sources: for each operation, the operations whose results it reads.
        reads: for each operation, the buckets in which the backward reads its results.
        forced: operations that are never recomputed.
        base: for each bucket of the backward, the most bytes that other values take.
        before: the same without the results of the bucket's own operations: the bytes alive while
            values are recomputed for them.
        ahead: for each bucket of the forward, the most bytes that are alive in it whatever is kept, and
            the earlier operations whose results are alive in it only if they are kept.
        passing: whether to count values that only other recomputations read. All of a bucket's are
            counted as alive at once, which may overestimate.
    """

    costs: list[int]
    sizes: list[int]
    times: list[int]
    sources: list[list[int]]
    reads: list[set[int]]
    forced: set[int]
    base: list[int]
    before: list[int]
    ahead: list[tuple[int, list[int]]]
    passing: bool = True

    @property
    def least(self) -> int:
        """A lower bound of the peak."""
        return int(self.fixed.max())

    @property
    def most(self) -> int:
        """An upper bound of the peak."""
        return self.least + sum(self.kept)

    @cached_property
    def kept(self) -> list[int]:
        """For each operation, the bytes of its results in all iterations."""
        return [size * times for size, times in zip(self.sizes, self.times, strict=True)]

    @cached_property
    def until(self) -> list[int]:
        """For each operation, the last bucket in which the backward reads its results; -1 if none."""
        return [max(reads, default=-1) for reads in self.reads]

    @cached_property
    def spans(self) -> list[range]:
        """For each operation, the buckets in which its results may be read, also by recomputations."""
        first = [min(reads, default=len(self.base)) for reads in self.reads]
        last = list(self.until)
        before = None
        while before != (before := [*first, *last]):  # in a loop, operations read later ones
            for v in reversed(range(len(self.sizes))):
                for u in self.sources[v]:
                    first[u], last[u] = min(first[u], first[v]), max(last[u], last[v])
        return [range(a, b + 1) for a, b in zip(first, last, strict=True)]

    @cached_property
    def recomputed(self) -> list[dict[int, int]]:
        """For each operation, the variable e_vk by bucket k; the variables before these are s_v."""
        return _columns(len(self.sizes), self.spans)

    @cached_property
    def lingering(self) -> list[dict[int, int]]:
        """For each operation, the variable x_vk by bucket k."""
        start = len(self.sizes) + sum(map(len, self.spans))
        return _columns(
            start,
            [range(last + 1, span.stop) for last, span in zip(self.until, self.spans, strict=True)],
        )

    @property
    def variables(self) -> int:
        return len(self.sizes) + sum(map(len, (*self.recomputed, *self.lingering)))

    def rules(self) -> Iterator[ConstraintRow]:
        """All inequalities except the bounds on memory."""
        e = self.recomputed
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
        """The bytes each variable adds: in the forward, in the backward, during recomputation."""
        for _, kept in self.ahead:
            yield {v: self.kept[v] for v in kept}
        read: list[dict[int, float]] = [{} for _ in self.base]
        recomputing: list[dict[int, float]] = [{} for _ in self.base]
        for v, size in enumerate(self.sizes):
            e, last = self.recomputed[v], self.until[v]
            held = [(k, v) for k in range(last + 1)] + list(self.lingering[v].items())
            for k, variable in held:
                read[k][variable] = recomputing[k][variable] = self.kept[v]
            for k in (k for k in self.spans[v] if k <= last):
                read[k][e[k]] = recomputing[k][e[k]] = size
            for k in self.spans[v]:
                if self.passing and k > last:  # recomputed for another recomputation, then freed
                    recomputing[k][e[k]] = size
                    if k - 1 in e:
                        recomputing[k][e[k - 1]] = -size
        yield from (*read, *recomputing)

    @cached_property
    def fixed(self) -> np.ndarray[Any, Any]:
        """For each row of `alive`, the bytes that are alive whatever is kept."""
        return np.array([*(size for size, _ in self.ahead), *self.base, *self.before])

    @cached_property
    def matrices(self) -> tuple[Any, np.ndarray[Any, Any], Any]:
        """The rules as a sparse matrix and its right-hand side, and the matrix of bytes."""
        rows = list(self.rules())
        right = np.array([bound for _, bound in rows])
        return self._sparse([row for row, _ in rows]), right, self._sparse(list(self.alive()))

    def _sparse(self, rows: Sequence[dict[int, float]]) -> Any:
        from scipy.sparse import csr_array

        entries = [(i, j, value) for i, row in enumerate(rows) for j, value in row.items()]
        i, j, values = zip(*entries, strict=True) if entries else ((), (), ())
        return csr_array((values, (i, j)), shape=(len(rows), self.variables))


def _columns(start: int, spans: Sequence[range]) -> list[dict[int, int]]:
    """Consecutive variable numbers, one for each bucket of each span."""
    columns = []
    for span in spans:
        columns.append({k: start + i for i, k in enumerate(span)})
        start += len(span)
    return columns


def solve(problem: Problem, bound: float) -> Solution | None:
    """The values to keep under a bound on the peak, in bytes; None if no choice fits.

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
    unit = max(problem.least, 1)  # scales coefficients to about one
    available = (bound - problem.fixed) / unit
    cost = np.zeros(problem.variables)
    cost[:count] = 1e-7 * np.array(problem.kept) / unit  # breaks ties in favour of keeping less
    for v, variables in enumerate(problem.recomputed):
        if variables:
            cost[max(variables.values())] += problem.costs[v] / max(max(problem.costs), 1)
    upper = np.ones(problem.variables)
    for v in problem.forced:
        upper[list(problem.recomputed[v].values())] = 0
    result = milp(
        cost,
        # Where s is integer, so are the least e and x that the rules allow. A bound may raise some of
        # them to fractions: the estimate is then rounded, and the true peak is simulated in any case.
        integrality=np.arange(problem.variables) < count,
        bounds=Bounds(0, upper),
        constraints=[
            LinearConstraint(rules, right, np.inf),
            LinearConstraint(alive / unit, -np.inf, available),
        ],
        options={"mip_rel_gap": _GAP, "node_limit": _NODES},
    )
    if result.x is None:
        return None
    held = alive @ np.round(result.x) + problem.fixed
    return Solution([v for v in range(count) if result.x[v] > 0.5], float(held.max()))
