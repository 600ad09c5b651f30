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
_Each = tuple[Collective, int]  # with the number of its iterations


@dataclass(frozen=True)
class PlanChange:
    """How another plan differs from this one.

    Attributes:
        seconds: how much longer it takes in the model; if it takes less time, a negative number.
        more, less: the collectives that only it has, and those that only this plan has, before any are
            merged; those of a loop once, with their number of iterations in ``times``.
        exact: whether no plan with what was asked for takes less time than it.
    """

    seconds: float
    more: Records
    less: Records
    exact: bool = True

    @property
    def bytes(self) -> int:
        """The bytes that each rank sends more; if it sends fewer, a negative number."""
        return _sent(self.more) - _sent(self.less)

    def __str__(self) -> str:
        most = "" if self.exact else "at most "
        lines = [f"{most}{_signed(self.seconds)}, {self.bytes:+,} bytes per rank"]
        lines += _lines("+", self.more) + _lines("-", self.less)
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
    return PlanChange(seconds, _only(others, mine), _only(mine, others), exact)


def _only(mine: Counter[_Each], others: Counter[_Each]) -> Records:
    """The collectives of a plan for which another has none of the same kind, axes and bytes."""
    like = Counter(map(_alike, (others - mine).elements()))
    found = Records()
    for each in (mine - others).elements():
        if like[_alike(each)]:
            like[_alike(each)] -= 1
        else:
            found.append(each[0].repeated(each[1]))
    return found


def _alike(each: _Each) -> tuple[object, ...]:
    record, count = each
    return record.called, record.axes, record.bytes, count


def _collectives(plan: Plan, mesh: Mesh) -> Counter[_Each]:
    """The collectives of a plan, each with the number of its iterations."""
    spmd = partition(plan.graph, plan.given, plan.decision, mesh.sizes)
    add_before_reducing(spmd)
    send_narrowly(spmd)
    attach_moves(spmd, mesh)
    attach_windows(spmd, mesh)
    return Counter((COLLECTIVE.of(n), times(n)) for n in spmd.nodes if COLLECTIVE.on(n))
