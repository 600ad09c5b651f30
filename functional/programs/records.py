"""Records: human-readable descriptions of nodes, and the lines of a program's reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torchard.functional.machines.machine import Link, Machine

__all__ = ["AxisWork", "PerIteration", "Record", "Records", "Work", "titled_table"]


class PerIteration:
    """Notes on a loop's operation that differ between iterations."""

    def in_iteration(self, i: int) -> Any:
        """The note on the operation of one iteration."""
        raise NotImplementedError


class Record(PerIteration):
    """The data of one line of a report; its ``str`` shows all of it.

    >>> from dataclasses import dataclass
    >>> from torchard.transforms import Record, Records
    >>> @dataclass
    ... class Rounded(Record):
    ...     path: str
    ...     bits: int
    ...     def __str__(self):
    ...         return f"{self.path} to {self.bits} bits"
    >>> print(Records([Rounded("w", 8), Rounded("b", 16)]))
    w to 8 bits
    b to 16 bits
    """

    @property
    def title(self) -> str:
        """A short name."""
        return str(self)

    @property
    def payload(self) -> str:
        """The data that the operation sends, for errors; empty if it sends nothing."""
        return ""

    def over(self, machine: Machine) -> tuple[tuple[str, ...], Link, int]:
        """The axes along which the operation sends, their link on a machine, and the bytes of a rank."""
        return (), machine.link, 0

    def in_backward(self) -> Record:
        """The record of the same operation, recomputed for a backward."""
        return self

    def in_iteration(self, i: int) -> Record:
        """The record of the same operation in one iteration of a loop."""
        return self

    def repeated(self, times: int) -> Record:
        """The record of all iterations of a loop, as a table shows it."""
        return self

    @classmethod
    def table(cls, records: Sequence[Any]) -> str:
        """Several records as text."""
        return "\n".join(map(str, records))


class Records(list[Any]):
    """A list of records of one class, which prints as its table.

    Args:
        records: the records.
        missed: finds near misses, on demand.
        shown: the records of its table, if those of a loop are shown once for all iterations.

    >>> import torch, torchard as ta
    >>> from torchard.transforms import Records
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> x = ta.place(torch.ones(4, 2), mesh, ta.P("tp"))
    >>> collectives = ta.shard(lambda x: x.sum(0), mesh, out_specs=ta.P()).lower(x).collectives
    >>> isinstance(collectives, Records), len(collectives)
    (True, 1)
    >>> str(collectives[0])
    'all_reduce(tp) [2] float32'
    """

    def __init__(
        self,
        records: Iterable[Any] = (),
        missed: Callable[[], list[Any]] | None = None,
        shown: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(records)
        self._missed = missed
        self._shown = shown

    @cached_property
    def missed(self) -> Records:
        """Near misses, each with the reason."""
        return Records(() if self._missed is None else self._missed())

    @property
    def shown(self) -> Sequence[Any]:
        """The records of its table, in which those of a loop are shown once for all iterations."""
        return self if self._shown is None else self._shown

    def __str__(self) -> str:
        own = str(type(self[0]).table(self.shown)) if self else "none"
        return f"{own}\n\n{self.missed}" if self._missed and self.missed else own


@dataclass(frozen=True)
class AxisWork:
    """How much of a program's work one mesh axis splits.

    Attributes:
        axis, size: of the mesh.
        flops, bytes: the part, from 0 to 1, of one device's that is in operations the axis splits.
    """

    axis: str
    size: int
    flops: float
    bytes: float


@dataclass(frozen=True)
class Work:
    """The work of a program.

    FLOPs are two per multiplication of a product (matrix products, convolutions, attention) and one per
    element of any other operation; bytes are those of all operands and results, except views. Transfers
    over the network are in ``Program.collectives``.

    Attributes:
        flops, bytes: the work on one device.
        rank_flops, rank_bytes: the work on the busiest rank.
        axes: the mesh axes, each with the fraction of the work that it splits.
    """

    flops: int
    bytes: int
    rank_flops: int
    rank_bytes: int
    axes: tuple[AxisWork, ...] = ()

    def __str__(self) -> str:
        rows = [
            ("", "ranks", "FLOPs", "bytes"),
            ("one device", "1", f"{self.flops:,}", f"{self.bytes:,}"),
        ]
        if self.axes:
            ranks = 1
            for axis in self.axes:
                ranks *= axis.size
            rows.append(("busiest rank", str(ranks), f"{self.rank_flops:,}", f"{self.rank_bytes:,}"))
            rows.append(("split by", "", "", ""))
            rows += [(f"  {a.axis}", str(a.size), f"{a.flops:.1%}", f"{a.bytes:.1%}") for a in self.axes]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        )


def titled_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns; the first names them, and is underlined."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * n for n in widths), *lines[1:]])
