"""Answers to ``why``: the layout of a value, the next best one, and what it would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchard.functional.programs.records import Record, titled_table
from torchard.functional.reports.time import duration
from torchard.sharding.scheduling.explained.changes import PlanChange
from torchard.sharding.values.spec import P

__all__ = ["PlanReason", "SpecGain"]


@dataclass(frozen=True)
class PlanReason(Record):
    """Why a value has its layout, or why a collective is needed.

    Attributes:
        what: the value with its dtype and shape, or the collective.
        layout: how the plan keeps the value, with its pending sums, as text.
        spec: the same as a spec; None of a collective.
        fixed: what fixes the layout: ``"its spec"``, ``"constrain"``, or ``"the plain argument"``, which
            is only returned, so that its spec does not split it; empty if the plan has chosen it.
        seconds: how long the plan takes.
        other: the next best layout; None if there is none, and of a collective.
        change: how the cheapest plan with that layout, or without the collective, differs from this one;
            None if there is none.
        compared: the plans among which it is the cheapest: all, or those that differ from this one along
            one axis.
    """

    what: str
    layout: str
    spec: P | None
    fixed: str
    seconds: float
    other: P | None
    change: PlanChange | None
    compared: str

    def __str__(self) -> str:
        if self.spec is None:
            return f"{self.what} {self.layout}\n{self._without()}"
        kept = f"{self.what} is {self.layout}"
        kept += f", which {self.fixed} fixes" if self.fixed else ""
        if self.change is None and self.fixed:
            return f"{kept}; nothing uses it in another layout that takes no more memory"
        if self.change is None:
            return f"{kept}; {self.compared} keep it so"
        return f"{kept}\nas {self.other}: {self._effect(self.change)}"

    def _without(self) -> str:
        if self.change is None:
            return f"{self.compared} have it"
        listed = self.change.more or self.change.less or self.change.alike
        sent = "" if listed else "; one like it moves another value"
        return f"without it: {self._effect(self.change)}{sent}"

    def _effect(self, change: PlanChange) -> str:
        head, *lines = str(change).splitlines()
        part = f" ({change.seconds / self.seconds:+.1%})" if self.seconds else ""
        return "\n".join([f"{head.replace(',', f'{part},', 1)}", *lines])

    @classmethod
    def table(cls, records: Sequence[PlanReason]) -> str:
        return "\n\n".join(map(str, records))


@dataclass(frozen=True)
class SpecGain(Record):
    """An input of which another spec would let the plan take less time.

    Attributes:
        path: the input; its gradient and its new value, if they have its spec, would have the other one.
        spec: its spec now.
        other: the better spec.
        change: what would change.
    """

    path: str
    spec: P
    other: P
    change: PlanChange

    @classmethod
    def table(cls, records: Sequence[SpecGain]) -> str:
        rows = [("input", "spec", "better as", "saves", "change in bytes")]
        rows += [
            (r.path, str(r.spec), str(r.other), duration(-r.change.seconds), f"{r.change.bytes:+,}")
            for r in records
        ]
        return titled_table(rows)

    def __str__(self) -> str:
        return f"{self.path} as {self.other}, not {self.spec}: {self.change}"
