"""How a collective changes the indices that each rank holds.

A value is held as some digits of each dim (see `holdings`), and over some axes as parts of a reduction. A
collective over some axes runs in groups of ranks, which differ only in their places along those axes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torchard.sharding.layouts.collective_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectiveOp,
    LocalSlice,
    PsumScatter,
    SubDim,
)
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.reshard import ReshardStep
from torchard.testing.prove.holdings import (
    Digit,
    Spread,
    digits_of,
    joined,
    parted,
    spread,
    spreads,
)

__all__ = ["awaited", "check_bucket", "check_step", "same"]

Digits = tuple[tuple[Digit, ...], ...]
Pending = frozenset[tuple[str, str]]


class _Unsound(Exception):
    """A step that does not do what the plan states; the message says why."""


@dataclass(frozen=True)
class _Value:
    digits: Digits
    pending: Pending

    def digit(self, place: SubDim) -> Digit:
        dim, sub = place
        if dim >= len(self.digits) or sub >= len(self.digits[dim]):
            raise _Unsound(f"there is no sub-dim {sub} of dim {dim}")
        return self.digits[dim][sub]

    def with_digit(self, place: SubDim, digit: Digit) -> _Value:
        dims = [list(dim) for dim in self.digits]
        dims[place[0]][place[1]] = digit
        return replace(self, digits=tuple(map(tuple, dims)))

    def splitting(self, axes: Sequence[str]) -> set[SubDim]:
        """The sub-dims of which ranks of a group hold different parts."""
        places = ((i, j) for i, dim in enumerate(self.digits) for j in range(len(dim)))
        return {place for place in places if set(self.digit(place).axes) & set(axes)}


def awaited(layout: Layout, sizes: Sizes) -> Pending:
    """The reductions that are still to come, over axes of more than one rank."""
    return frozenset((a, op) for a, op in layout.pending if dict(sizes)[a] > 1)


def same(one: Layout, other: Layout, sizes: Sizes) -> bool:
    """Whether two layouts say the same of every rank."""
    if one.shape != other.shape or awaited(one, sizes) != awaited(other, sizes):
        return False
    return spreads(one, sizes) == spreads(other, sizes)


@functools.lru_cache(maxsize=65536)
def check_step(step: ReshardStep, have: Layout, want: Layout, sizes: Sizes) -> str:
    """Why a step does not take a value from one layout to another; nothing if it does."""
    if not same(step.before, have, sizes):
        return f"the step starts from {step.before}, and its operand is held as {have}"
    if not same(step.after, want, sizes):
        return f"the step ends in {step.after}, and its result is taken to be held as {want}"
    start = _Value(tuple(digits_of(dim, sizes) for dim in step.before.dims), awaited(have, sizes))
    op = replace(step.collective, axes=tuple(a for a in step.axes if dict(sizes)[a] > 1))
    try:
        made = _after(op, start, sizes)
    except _Unsound as why:
        return f"{step.kind} over {'·'.join(step.axes)} of {step.before}: {why}"
    if _spreads(made.digits, sizes) != spreads(want, sizes) or made.pending != awaited(want, sizes):
        return f"{step.kind} over {'·'.join(step.axes)} of {step.before} does not give {want}"
    return ""


def _spreads(digits: Digits, sizes: Sizes) -> tuple[Spread, ...]:
    found: list[Spread] = []
    for dim in digits:
        size = 1
        for digit in dim:
            size *= digit.size
        cut = spread(dim, (size,), sizes)
        assert cut is not None
        found += cut
    return tuple(found)


def _after(op: CollectiveOp, value: _Value, sizes: Sizes) -> _Value:
    """How a value is held after a collective."""
    if isinstance(op, (AllReduce, PsumScatter)):
        value = _reduced(op.axes, op.reduction, value)
        return value if isinstance(op, AllReduce) else _parted(op.axes, op.to, value, sizes)
    if reduced := {a for a, _ in value.pending} & set(op.axes):
        raise _Unsound(f"the ranks hold parts of a reduction over {', '.join(sorted(reduced))}")
    if isinstance(op, LocalSlice):
        return _parted(op.axes, op.to, value, sizes)
    if isinstance(op, AllGather):
        return _joined(op.axes, op.at, value, sizes)
    if isinstance(op, AllToAll) and op.at != op.to:
        return _parted(op.axes, op.to, _joined(op.axes, op.at, value, sizes), sizes)
    raise _Unsound("it is not a step between two layouts")


def _reduced(axes: tuple[str, ...], reduction: str | None, value: _Value) -> _Value:
    for axis in axes:
        if (axis, reduction) not in value.pending:
            raise _Unsound(f"no {reduction} over {axis} is pending")
    if split := value.splitting(axes):
        raise _Unsound(f"ranks that it reduces over hold different parts of dim {min(split)[0]}")
    return replace(value, pending=value.pending - {(a, str(reduction)) for a in axes})


def _parted(axes: tuple[str, ...], to: SubDim, value: _Value, sizes: Sizes) -> _Value:
    if split := value.splitting(axes):
        raise _Unsound(f"ranks of a group hold different parts of dim {min(split)[0]} already")
    return value.with_digit(to, parted(value.digit(to), axes, sizes))


def _joined(axes: tuple[str, ...], at: SubDim, value: _Value, sizes: Sizes) -> _Value:
    digit = value.digit(at)
    if other := value.splitting(axes) - {at}:
        raise _Unsound(
            f"ranks of a group hold different parts of dim {min(other)[0]}, not of {at[0]}"
        )
    if missing := [a for a in axes if a not in digit.axes]:
        raise _Unsound(f"dim {at[0]} is not split over {', '.join(missing)}")
    made = joined(digit, axes, sizes)
    if made is None:
        raise _Unsound(f"the parts of dim {at[0]} would not be in order")
    return value.with_digit(at, made)


def check_bucket(members: Iterable[tuple[ReshardStep, object]]) -> str:
    """Why steps, each with a dtype, cannot be sent as one call; nothing if they can."""
    kinds = {(type(step.collective), step.axes, step.reduction, dtype) for step, dtype in members}
    if len(kinds) < 2:
        return ""
    listed = sorted(f"{c.kind} over {'·'.join(axes)} of {d}" for c, axes, _, d in kinds)
    return f"collectives that differ are sent as one call: {', '.join(listed)}"
