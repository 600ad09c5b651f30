"""What a program computes: on one device, and on the busiest rank of a mesh."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.flops import flops
from torchard.functional.programs.program import Program
from torchard.functional.programs.views import is_view

__all__ = ["AxisWork", "Work", "bytes_touched", "work_of"]


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
    """What a program computes.

    FLOPs are two per multiplication of a product (matrix products, convolutions, attention) and one per
    element of anything else; bytes are those of all operands and results, views not counted. What
    crosses the network is in ``Program.collectives``.

    Attributes:
        flops, bytes: on one device.
        rank_flops, rank_bytes: on the busiest rank.
        axes: the mesh axes, each with the part of the work it splits.
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


def work_of(program: Program) -> Work:
    """The work of a program, over its mesh if it has one."""
    over_mesh = getattr(program.runtime, "work", None)
    if over_mesh is not None:
        work: Work = over_mesh(program)
        return work
    done, touched = sum(map(flops, program.calls)), sum(map(bytes_touched, program.calls))
    return Work(done, touched, done, touched)


def bytes_touched(node: fx.Node) -> int:
    """Bytes of an operation's operands and results; none of a view or an item of a tuple."""
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return 0
    values = [n.meta.get("val") for n in node.all_input_nodes]
    return sum(map(_bytes, [*values, node.meta.get("val")]))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, Iterable) else 0
