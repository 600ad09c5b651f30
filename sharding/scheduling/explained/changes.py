"""How two plans differ: their seconds, and the collectives that one of them has and the other has not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torchard.functional.programs.loops import times
from torchard.functional.programs.records import Records
from torchard.functional.programs.tags import COLLECTIVE
from torchard.functional.reports.time import duration
from torchard.sharding.lowering.lower_manual import attach_moves
from torchard.sharding.lowering.windows import attach_windows
from torchard.sharding.planning.decision import Plan
from torchard.sharding.scheduling.added_sums import add_before_reducing
from torchard.sharding.scheduling.casts import send_narrowly
from torchard.sharding.scheduling.collectives import Collective
from torchard.sharding.scheduling.partition import partition
from torchard.sharding.values.mesh import Mesh

__all__ = ["PlanChange", "change_between"]

_LISTED = 8  # collectives of a change in its text


@dataclass(frozen=True)
class PlanChange:
    """How another plan differs from this one.

    Attributes:
        seconds: how much longer it takes in the model; if it takes less time, a negative number.
        more, less: the collectives that only it has, and those that only this plan has, before any are
            merged; those of a loop once, with their number of iterations in ``times``.
        exact: whether no plan with what was asked for takes less time than it.
        alike: the number of further pairs of collectives, one of each plan, of equal kind, axes and
            bytes: they move other values, or the same one at another place.
    """

    seconds: float
    more: Records
    less: Records
    exact: bool = True
    alike: int = 0

    @property
    def bytes(self) -> int:
        """The bytes that each rank sends more; if it sends fewer, a negative number."""
        return _sent(self.more) - _sent(self.less)

    def __str__(self) -> str:
        most = "" if self.exact else "at most "
        lines = [f"{most}{_signed(self.seconds)}, {self.bytes:+,} bytes per rank"]
        lines += _lines("+", self.more) + _lines("-", self.less)
        lines += [f"  = {self.alike} of equal kind, axes and bytes"] if self.alike else []
        return "\n".join(lines)


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{duration(abs(seconds))}"


def _sent(records: Records) -> int:
    return sum(record.bytes * record.times for record in records)


def _lines(sign: str, records: Records) -> list[str]:
    """A line for each collective, equal ones once."""
    counted = Counter((str(r), r.bytes, r.source, r.times) for r in records)
    lines = [
        f"  {sign} {text}{f' × {n * t}' if n * t > 1 else ''}, {size * n * t:,} bytes"
        f"{f' at {source}' if source else ''}"
        for (text, size, source, t), n in counted.items()
    ]
    rest = len(lines) - _LISTED
    return lines if rest <= 0 else [*lines[:_LISTED], f"  {sign} {rest} more"]


def change_between(
    plan: Plan, other: Plan, seconds: float, mesh: Mesh, exact: bool = True
) -> PlanChange:
    """How another plan of the same graph differs from a plan."""
    mine, others = _collectives(plan, mesh), _collectives(other, mesh)
    more, less = _records(others - mine), _records(mine - others)
    alike = Counter(map(_key, more)) & Counter(map(_key, less))
    return PlanChange(seconds, _rest(more, alike), _rest(less, alike), exact, alike.total())


def _records(counted: Counter[tuple[Collective, int]]) -> Records:
    return Records(record.repeated(count) for record, count in counted.elements())


def _rest(records: Records, alike: Counter[tuple[object, ...]]) -> Records:
    """The records without as many of each key."""
    left, found = Counter(alike), Records()
    for record in records:
        left[_key(record)] -= 1
        if left[_key(record)] < 0:
            found.append(record)
    return found


def _key(record: Collective) -> tuple[object, ...]:
    return record.called, record.axes, record.bytes, record.times


def _collectives(plan: Plan, mesh: Mesh) -> Counter[tuple[Collective, int]]:
    """The collectives of a plan, each with the number of its iterations."""
    spmd = partition(plan.graph, plan.given, plan.decision, mesh.sizes)
    add_before_reducing(spmd)
    send_narrowly(spmd)
    attach_moves(spmd, mesh)
    attach_windows(spmd, mesh)
    return Counter((COLLECTIVE.of(n), times(n)) for n in spmd.nodes if COLLECTIVE.on(n))
