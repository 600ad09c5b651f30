"""Reshards: the collectives from one layout to another that send the fewest elements.

Both layouts are first cut at common sub-dim boundaries. A shortest-path search over the state of each
axis (splitting a sub-dim, replicated, or pending) then finds the cheapest steps. The cost of a step is
the number of elements that a rank sends under ring algorithms (Patarasuk & Yuan 2009), so a slice is
free, an all_to_all is cheaper than a gather, and a psum_scatter costs half an all_reduce.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torchard.sharding.layouts.collective_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectiveOp,
    LocalSlice,
    PsumScatter,
)
from torchard.sharding.layouts.layout import Dim, Layout, Sizes, Sub, refine

__all__ = ["ReshardStep", "common_dim", "cost", "plan"]

_LATENCY = 1e-3  # the fixed cost of a collective, in elements: breaks ties in favour of fewer collectives


@dataclass(frozen=True)
class ReshardStep:
    """One collective between two layouts, to whose sub-dims its ``at`` and ``to`` refer."""

    collective: CollectiveOp
    before: Layout
    after: Layout

    @property
    def kind(self) -> str:
        return self.collective.kind

    @property
    def axes(self) -> tuple[str, ...]:
        return self.collective.axes

    @property
    def reduction(self) -> str | None:
        return self.collective.reduction

    def elements(self, sizes: Sizes) -> float:
        """The elements that a rank sends under the ring algorithm, with shards padded to the largest."""
        table = dict(sizes)
        ranks = math.prod(table[a] for a in self.axes)
        before, after = self.before.largest_local(table), self.after.largest_local(table)
        return self.collective.elements(before, after, ranks)


@functools.lru_cache(maxsize=16384)
def plan(before: Layout, after: Layout, sizes: Sizes) -> tuple[ReshardStep, ...]:
    """The cheapest steps from one layout to another.

    Raises:
        ValueError: ``after`` is pending where ``before`` is not, or they vary over different axes.
    """
    if before == after:
        return ()
    if extra := set(after.pending) - set(before.pending):
        raise ValueError(f"cannot make {before} pending over {sorted(extra)}")
    if after.varying != before.varying:
        raise ValueError(f"cannot reshard {before} to {after}: a varying value is not reduced implicitly")
    cut = _common(before, after, sizes)
    if cut is None:
        middle = _release(before, after, sizes)
        return plan(before, middle, sizes) + plan(middle, after, sizes)
    return _join_reductions(_search(*cut, sizes))


@functools.lru_cache(maxsize=16384)
def cost(before: Layout, after: Layout, sizes: Sizes) -> float:
    """The elements that a rank sends in the cheapest plan, plus a latency term that only breaks ties."""
    steps = plan(before, after, sizes)
    return sum(s.elements(sizes) + _LATENCY * s.collective.sends for s in steps)


def _common(before: Layout, after: Layout, sizes: Sizes) -> tuple[Layout, Layout] | None:
    """Both layouts cut at common sub-dim boundaries; None if one of these falls inside a shard."""
    cut = []
    for b, a in zip(before.dims, after.dims, strict=True):
        if (pair := common_dim(b, a, sizes)) is None:
            return None
        cut.append(pair)
    return (
        Layout(tuple(p[0] for p in cut), before.pending),
        Layout(tuple(p[1] for p in cut), after.pending),
    )


@functools.lru_cache(maxsize=16384)
def common_dim(before: Dim, after: Dim, sizes: Sizes) -> tuple[Dim, Dim] | None:
    """A dim of both layouts, cut at common boundaries; None if one of these falls inside a shard."""
    if len(before) == 1 and len(after) == 1:
        return before, after
    # Multisets, since a sub-dim of size one, which a single shard may own, repeats a boundary.
    boundaries = sorted((_boundaries(before) | _boundaries(after)).elements())
    if 0 in boundaries or any(b % a for a, b in itertools.pairwise(boundaries)):
        return None
    factors = tuple(b // a for a, b in itertools.pairwise([1, *boundaries]))
    cut_before, cut_after = refine(before, factors, sizes), refine(after, factors, sizes)
    if cut_before is None or cut_after is None:
        return None
    if any(len(d) != 1 for d in (*cut_before, *cut_after)):
        return None
    return tuple(d[0] for d in cut_before), tuple(d[0] for d in cut_after)


def _boundaries(dim: Dim) -> Counter[int]:
    return Counter(itertools.accumulate((s.size for s in dim), lambda x, y: x * y))


def _release(before: Layout, after: Layout, sizes: Sizes) -> Layout:
    """``before`` with those dims gathered that have no common boundaries with ``after``."""
    dims = []
    for b, a in zip(before.dims, after.dims, strict=True):
        size = math.prod(s.size for s in b)
        dims.append(b if common_dim(b, a, sizes) is not None else (Sub(size),))
    return Layout(tuple(dims), before.pending)


_State = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]
_Path = tuple[tuple[CollectiveOp, _State], ...]  # each collective, with the state after it


class _Space:
    """The search space, whose states are the axes that split each sub-dim, and the pending ones."""

    def __init__(self, before: Layout, after: Layout, sizes: Sizes) -> None:
        self.places = [(d, s) for d, dim in enumerate(before.dims) for s in range(len(dim))]
        self.before, self.after, self.table = before, after, dict(sizes)
        self.goal = self.state(after)
        self.target = {a: i for i, axes in enumerate(self.goal[0]) for a in axes}
        self._known: dict[_State, int] = {}

    def state(self, layout: Layout) -> _State:
        return tuple(layout.dims[d][s].axes for d, s in self.places), layout.pending

    def layout(self, state: _State) -> Layout:
        axes = iter(state[0])
        dims = tuple(tuple(Sub(s.size, next(axes)) for s in dim) for dim in self.before.dims)
        return Layout(dims, state[1])

    def cost(self, move: CollectiveOp, state: _State, then: _State) -> float:
        """The elements that a rank sends, and a latency."""
        ranks = math.prod(self.table[a] for a in move.axes)
        sent = move.elements(self._elements(state), self._elements(then), ranks)
        return sent + (_LATENCY if move.sends else _LATENCY / 10)

    def _elements(self, state: _State) -> int:
        """The elements of the largest shard."""
        known = self._known.get(state)
        if known is None:
            known = self._known[state] = self.layout(state).largest_local(self.table)
        return known

    def moves(self, state: _State) -> Iterator[tuple[CollectiveOp, _State]]:
        """Every collective over one axis that is possible in a state, with the state after it."""
        splits, pending = state
        held = {a for axes in splits for a in axes} | {a for a, _ in pending}
        for axis, op in pending:
            if (axis, op) in self.after.pending:
                continue
            rest = tuple(p for p in pending if p[0] != axis)
            yield AllReduce((axis,), op), (splits, rest)
            if (to := self.target.get(axis)) is not None:
                yield PsumScatter((axis,), self.places[to], op), (_put(splits, to, axis), rest)
        for at, axes in enumerate(splits):
            if not axes:
                continue
            axis = axes[-1]
            less = (*splits[:at], axes[:-1], *splits[at + 1 :])
            yield AllGather((axis,), self.places[at]), (less, pending)
            to = self.target.get(axis)
            if to is not None and to != at:
                exchange = AllToAll((axis,), self.places[at], self.places[to])
                yield exchange, (_put(less, to, axis), pending)
        for axis, to in self.target.items():
            if axis not in held:
                yield LocalSlice((axis,), self.places[to]), (_put(splits, to, axis), pending)


def _put(splits: tuple[tuple[str, ...], ...], to: int, axis: str) -> tuple[tuple[str, ...], ...]:
    return (*splits[:to], (*splits[to], axis), *splits[to + 1 :])


def _search(before: Layout, after: Layout, sizes: Sizes) -> list[ReshardStep]:
    """The steps of a shortest path, by Dijkstra's algorithm."""
    space = _Space(before, after, sizes)
    start = space.state(before)
    order = itertools.count()  # decides between equal costs
    queue: list[tuple[float, int, _State, _Path]] = [(0.0, next(order), start, ())]
    seen: set[_State] = set()
    while queue:
        spent, _, state, path = heapq.heappop(queue)
        if state == space.goal:
            layouts = [space.layout(s) for s in (start, *(s for _, s in path))]
            each = zip((move for move, _ in path), itertools.pairwise(layouts), strict=True)
            return [ReshardStep(move, *around) for move, around in each]
        if state in seen:
            continue
        seen.add(state)
        for move, then in space.moves(state):
            if then not in seen:
                cost = space.cost(move, state, then)
                heapq.heappush(queue, (spent + cost, next(order), then, (*path, (move, then))))
    raise AssertionError(f"no sequence of collectives leads from {before} to {after}")


def _join_reductions(steps: list[ReshardStep]) -> tuple[ReshardStep, ...]:
    """The steps with consecutive all_reduces of one reduction merged, over the product of their axes."""
    merged: list[ReshardStep] = []
    for step in steps:
        joint = _joined(merged[-1].collective, step.collective) if merged else None
        if joint is None:
            merged.append(step)
        else:
            merged[-1] = ReshardStep(joint, merged[-1].before, step.after)
    return tuple(merged)


def _joined(first: CollectiveOp, then: CollectiveOp) -> AllReduce | None:
    """The all_reduce that is equivalent to two of the same reduction; None for other collectives."""
    if isinstance(first, AllReduce) and isinstance(then, AllReduce) and first.reduction == then.reduction:
        return AllReduce(first.axes + then.axes, first.reduction)
    return None
