"""Reports of matches, of kernels in use, and of near misses."""

from __future__ import annotations

from collections import UserString
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from torchard.functional.core.scope_frames import in_iteration
from torchard.functional.programs.records import Record
from torchard.functional.programs.tags import PHASE, SCOPE, SOURCE
from torchard.kernels.rewriting.plan import Part
from torchard.kernels.terms.reading import Reading

__all__ = ["Match", "Missed", "Use"]

# The number of rows in a table of near misses; the rest is counted.
_SHOWN = 12


def _where(node: fx.Node) -> tuple[str, str, str]:
    """The scope, the source line and the phase of a node."""
    return SCOPE.get(node) or "", SOURCE.get(node) or "", PHASE.get(node) or "forward"


@dataclass(frozen=True)
class Match:
    """One occurrence of a pattern.

    Attributes:
        name: the name of the pattern.
        scope, source: the scope and line of its first result.
        phase: forward or backward.
        shapes: the shapes of its inputs.
        literals: the values of its literals.
        nodes: the names of the nodes that become dead with it.
        bytes_before, bytes_after: the bytes moved by its operations one by one, and by one kernel.
    """

    name: str
    scope: str
    source: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    literals: tuple[tuple[str, Any], ...]
    nodes: tuple[str, ...]
    bytes_before: int
    bytes_after: int

    @staticmethod
    def of(part: Part, reading: Reading) -> Match:
        node = part.firsts[0]
        inside = sorted(part.gone, key=reading.order.__getitem__)
        return Match(
            part.occurrence.pattern.name,
            *_where(node),
            tuple(value.shape for value in part.occurrence.inputs),
            part.occurrence.literals,
            tuple(n.name for n in inside),
            part.before,
            part.after,
        )


@dataclass(frozen=True)
class Use(Record):
    """One kernel of a program.

    Attributes:
        kernel: the name of the kernel.
        scope, source, phase: the place of its first result in the program.
        how: the implementation; the string changes at the first call, which chooses an implementation.
        operations: the number of operations that the kernel replaced.
        bytes_before, bytes_after: the bytes that the replaced operations move, and that the kernel moves.
        times: in a table, the number of iterations of the loop around the kernel.
    """

    kernel: str
    scope: str
    source: str
    phase: str
    how: str | UserString
    operations: int
    bytes_before: int
    bytes_after: int
    times: int = field(default=1, compare=False)

    @staticmethod
    def of(name: str, how: str | UserString, part: Part) -> Use:
        return Use(
            name,
            *_where(part.firsts[0]),
            how,
            part.operations,
            part.before,
            part.after,
        )

    def __str__(self) -> str:
        return self.kernel

    def in_iteration(self, i: int) -> Use:
        return replace(self, scope=in_iteration(self.scope, i))

    def repeated(self, times: int) -> Use:
        return replace(self, times=times)

    @classmethod
    def table(cls, uses: Sequence[Use]) -> str:
        rows = [("kernel", "phase", "scope", "source", "by", "operations", "bytes before", "after")]
        rows += [
            (
                u.kernel if u.times == 1 else f"{u.kernel} × {u.times}",
                u.phase,
                u.scope,
                u.source,
                str(u.how),
                str(u.operations),
                f"{u.bytes_before:,}",
                f"{u.bytes_after:,}",
            )
            for u in uses
        ]
        return _aligned(rows)


@dataclass(frozen=True)
class Missed(Record):
    """A near miss of a kernel, or an occurrence that was not replaced.

    Attributes:
        kernel: the name of the kernel.
        scope, source, phase: where it is.
        why: the difference from the pattern, or why the occurrence was not replaced.
    """

    kernel: str
    scope: str
    source: str
    phase: str
    why: str

    @staticmethod
    def of(kernel: str, node: fx.Node, why: str) -> Missed:
        return Missed(
            kernel,
            *_where(node),
            why,
        )

    def __str__(self) -> str:
        scope = f" (scope {self.scope})" if self.scope else ""
        return f"{self.kernel} at {self.source}{scope}: {self.why}"

    @classmethod
    def table(cls, missed: Sequence[Missed]) -> str:
        """A row for each kernel, phase and reason, with the first of several places."""
        places: dict[tuple[str, str, str], list[Missed]] = {}
        for miss in missed:
            places.setdefault((miss.kernel, miss.phase, miss.why), []).append(miss)
        rows = [("near miss", "phase", "scope", "source", "times", "why")]
        for (kernel, phase, why), misses in list(places.items())[:_SHOWN]:
            first = misses[0]
            rows.append((kernel, phase, first.scope, first.source, str(len(misses)), why))
        more = len(places) - _SHOWN
        return _aligned(rows) + (f"\nand {more} more: .kernels.missed" if more > 0 else "")


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )
