"""Reshard planning: from one layout to another with the fewest bytes on the wire.

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
from dataclasses import dataclass, replace

from torchard.sharding.layouts.layout import Dim, Layout, Sizes, Sub, refine

__all__ = ["Step", "cost", "plan"]

_LATENCY = 1e-3  # elements' worth of a collective's fixed cost: breaks ties towards fewer of them


@dataclass(frozen=True)
class Step:
    """One move of one axis (or of several that are reduced together).

    Attributes:
        kind: all_reduce, psum_scatter, all_gather, all_to_all or slice; ppermute in manual mode.
        axes: the mesh axes it runs over.
        before, after: layouts with explicit sub-dims, which ``at`` and ``to`` count in.
        at: (dim, sub-dim) the axis splits before; to: after.
        op: the reduction, for all_reduce and psum_scatter.
        pairs: (source, target) positions along the axes, for ppermute.
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    at: tuple[int, int] | None = None
    to: tuple[int, int] | None = None
    op: str | None = None
    pairs: tuple[tuple[int, int], ...] = ()

    def elements(self, sizes: Sizes) -> float:
        """Elements on the wire per rank by the ring algorithm, every shard padded to the largest."""
        table = dict(sizes)
        k = math.prod(table[a] for a in self.axes)
        before, after = self.before.largest_local(table), self.after.largest_local(table)
        volume = {
            "slice": 0.0,
            "all_gather": before * k,
            "all_to_all": before,
            "psum_scatter": after * k,
            "all_reduce": 2.0 * before,
            "ppermute": before * k / max(k - 1, 1),
        }[self.kind]
        return volume * (k - 1) / k


@functools.lru_cache(maxsize=65536)
def plan(before: Layout, after: Layout, sizes: Sizes) -> tuple[Step, ...]:
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
    return sum(s.elements(sizes) + _LATENCY * (s.kind != "slice") for s in steps)


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

    def moves(self, state: _State) -> Iterator[tuple[str, str, int | None, int | None, _State]]:
        """(kind, axis, from place, to place, next state) for every single-axis move."""
        splits, pending = state
        held = {a for axes in splits for a in axes} | {a for a, _ in pending}
        for axis, _ in pending:
            rest = tuple(p for p in pending if p[0] != axis)
            if (axis, dict(pending)[axis]) in self.after.pending:
                continue
            yield "all_reduce", axis, None, None, (splits, rest)
            if (to := self.target.get(axis)) is not None:
                yield "psum_scatter", axis, None, to, (_put(splits, to, axis), rest)
        for at, axes in enumerate(splits):
            if not axes:
                continue
            axis = axes[-1]
            less = (*splits[:at], axes[:-1], *splits[at + 1 :])
            yield "all_gather", axis, at, None, (less, pending)
            to = self.target.get(axis)
            if to is not None and to != at:
                yield "all_to_all", axis, at, to, (_put(less, to, axis), pending)
        for axis, to in self.target.items():
            if axis not in held:
                yield "slice", axis, None, to, (_put(splits, to, axis), pending)


def _put(splits: tuple[tuple[str, ...], ...], to: int, axis: str) -> tuple[tuple[str, ...], ...]:
    return (*splits[:to], (*splits[to], axis), *splits[to + 1 :])


def _search(before: Layout, after: Layout, sizes: Sizes) -> list[Step]:
    space = _Space(before, after, sizes)
    start = space.state(before)
    tie = itertools.count()
    queue: list[tuple[float, int, _State, tuple[Step, ...]]] = [(0.0, next(tie), start, ())]
    seen: set[_State] = set()
    while queue:
        spent, _, state, steps = heapq.heappop(queue)
        if state == space.goal:
            return list(steps)
        if state in seen:
            continue
        seen.add(state)
        for kind, axis, at, to, after_state in space.moves(state):
            if after_state in seen:
                continue
            step = _step(space, kind, axis, at, to, state, after_state)
            price = step.elements(sizes) + (_LATENCY if kind != "slice" else _LATENCY / 10)
            heapq.heappush(queue, (spent + price, next(tie), after_state, (*steps, step)))
    raise AssertionError(f"no way from {before} to {after}")


def _step(
    space: _Space,
    kind: str,
    axis: str,
    at: int | None,
    to: int | None,
    before: _State,
    after: _State,
) -> Step:
    return Step(
        kind,
        (axis,),
        space.layout(before),
        space.layout(after),
        None if at is None else space.places[at],
        None if to is None else space.places[to],
        dict(before[1]).get(axis),
    )


def _join_reductions(steps: list[Step]) -> tuple[Step, ...]:
    """Neighbouring all_reduces of one operation become one, over the product of their axes."""
    out: list[Step] = []
    for step in steps:
        last = out[-1] if out else None
        if last and last.kind == step.kind == "all_reduce" and last.op == step.op:
            out[-1] = replace(last, axes=last.axes + step.axes, after=step.after)
        else:
            out.append(step)
    return tuple(out)
