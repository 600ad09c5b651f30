"""Reshard planning: from one layout to another with the fewest bytes sent.

Both layouts are first cut at common sub-dim boundaries. A shortest-path search over what each axis does
(split a sub-dim, hold everything, be pending) then finds the cheapest steps; costs are elements a rank
sends and receives under ring algorithms (Patarasuk & Yuan 2009), so a slice is free, an all_to_all is
cheaper than a gather, and a psum_scatter costs half an all_reduce.
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

__all__ = ["ReshardStep", "cost", "plan"]

_LATENCY = 1e-3  # elements' worth of a collective's fixed cost: breaks ties towards fewer of them


@dataclass(frozen=True)
class ReshardStep:
    """One collective between two layouts, with explicit sub-dims, in which its places count."""

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
        """Elements on the wire per rank by the ring algorithm, every shard padded to the largest."""
        table = dict(sizes)
        ranks = math.prod(table[a] for a in self.axes)
        before, after = self.before.largest_local(table), self.after.largest_local(table)
        return self.collective.elements(before, after, ranks)


@functools.lru_cache(maxsize=65536)
def plan(before: Layout, after: Layout, sizes: Sizes) -> tuple[ReshardStep, ...]:
    """The cheapest steps that take a value from one layout to another (which pends nowhere new)."""
    if before == after:
        return ()
    if extra := set(after.pending) - set(before.pending):
        raise ValueError(f"cannot make {before} pending over {sorted(extra)}")
    if after.varying != before.varying:
        raise ValueError(f"no reduction makes one value of what varies in {before}")
    cut = _common(before, after, sizes)
    if cut is None:
        middle = _release(before, after, sizes)
        return plan(before, middle, sizes) + plan(middle, after, sizes)
    return _join_reductions(_search(*cut, sizes))


@functools.lru_cache(maxsize=65536)
def cost(before: Layout, after: Layout, sizes: Sizes) -> float:
    """Elements on the wire per rank of the plan, plus a latency term that only breaks ties."""
    steps = plan(before, after, sizes)
    return sum(s.elements(sizes) + _LATENCY * s.collective.sends for s in steps)


def _common(before: Layout, after: Layout, sizes: Sizes) -> tuple[Layout, Layout] | None:
    """Both layouts with the same sub-dim boundaries, or None where some cut through a shard."""
    pairs = [_common_dim(b, a, sizes) for b, a in zip(before.dims, after.dims, strict=True)]
    if any(p is None for p in pairs):
        return None
    done = [p for p in pairs if p is not None]
    return (
        Layout(tuple(p[0] for p in done), before.pending),
        Layout(tuple(p[1] for p in done), after.pending),
    )


def _common_dim(before: Dim, after: Dim, sizes: Sizes) -> tuple[Dim, Dim] | None:
    if len(before) == 1 and len(after) == 1:
        return before, after
    # As multisets: a factor of size one, which one shard alone may own, is a boundary met twice.
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
    """``before`` with every dim that shares no boundaries with ``after`` held whole."""
    dims = []
    for b, a in zip(before.dims, after.dims, strict=True):
        size = math.prod(s.size for s in b)
        dims.append(b if _common_dim(b, a, sizes) is not None else (Sub(size),))
    return Layout(tuple(dims), before.pending)


_State = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]


class _Space:
    """The search space: the axes at each sub-dim, and what is pending."""

    def __init__(self, before: Layout, after: Layout, sizes: Sizes) -> None:
        self.places = [(d, s) for d, dim in enumerate(before.dims) for s in range(len(dim))]
        self.before, self.after, self.sizes = before, after, sizes
        self.goal = self.state(after)
        self.target = {a: i for i, axes in enumerate(self.goal[0]) for a in axes}

    def state(self, layout: Layout) -> _State:
        return tuple(layout.dims[d][s].axes for d, s in self.places), layout.pending

    def layout(self, state: _State) -> Layout:
        axes = iter(state[0])
        dims = tuple(tuple(Sub(s.size, next(axes)) for s in dim) for dim in self.before.dims)
        return Layout(dims, state[1])

    def moves(self, state: _State) -> Iterator[tuple[CollectiveOp, _State]]:
        """Every collective over one axis, and the state after it."""
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
    space = _Space(before, after, sizes)
    start = space.state(before)
    tie = itertools.count()
    queue: list[tuple[float, int, _State, tuple[ReshardStep, ...]]] = [(0.0, next(tie), start, ())]
    seen: set[_State] = set()
    while queue:
        spent, _, state, steps = heapq.heappop(queue)
        if state == space.goal:
            return list(steps)
        if state in seen:
            continue
        seen.add(state)
        for collective, after_state in space.moves(state):
            if after_state in seen:
                continue
            step = ReshardStep(collective, space.layout(state), space.layout(after_state))
            cost = step.elements(sizes) + (_LATENCY if collective.sends else _LATENCY / 10)
            heapq.heappush(queue, (spent + cost, next(tie), after_state, (*steps, step)))
    raise AssertionError(f"no way from {before} to {after}")


def _join_reductions(steps: list[ReshardStep]) -> tuple[ReshardStep, ...]:
    """Neighbouring all_reduces of one operation become one, over the product of their axes."""
    out: list[ReshardStep] = []
    for step in steps:
        joint = _joined(out[-1].collective, step.collective) if out else None
        if joint is None:
            out.append(step)
        else:
            out[-1] = ReshardStep(joint, out[-1].before, step.after)
    return tuple(out)


def _joined(first: CollectiveOp, then: CollectiveOp) -> AllReduce | None:
    """One collective that does what two do, if they are all_reduces of one operation."""
    if isinstance(first, AllReduce) and isinstance(then, AllReduce) and first.reduction == then.reduction:
        return AllReduce(first.axes + then.axes, first.reduction)
    return None
