"""Reshard steps as nodes of a program, and the records of their communication.

On the global values of a Program every step is the identity: only the layout of the value changes. A
runtime lowers the nodes to the operations of each rank.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from torchard.functional.core.scope_frames import in_iteration
from torchard.functional.machines.machine import Link, Machine
from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.records import Record
from torchard.functional.programs.tagging import put
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, PHASE, SCOPE, SOURCE, STEP, VAL
from torchard.sharding.layouts.collective_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectiveOp,
    LocalSlice,
    PsumScatter,
    Send,
)
from torchard.sharding.layouts.layout import Sizes
from torchard.sharding.layouts.reshard import ReshardStep
from torchard.sharding.rules import lookup
from torchard.sharding.values.constrain import constraint_spec

__all__ = ["STEPS", "Collective", "emit_step", "op_of", "record_of", "table"]


def all_reduce(x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
    """Complete a pending reduction: every rank gets the result."""
    return x


def psum_scatter(x: torch.Tensor, axes: Sequence[str], op: str = "sum") -> torch.Tensor:
    """Complete a pending reduction: every rank gets its shard of the result."""
    return x


def all_gather(x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Gather the shards of a split dim on every rank."""
    return x


def all_to_all(x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Move a split from one dim to another."""
    return x


def take_slice(x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Keep this rank's shard of a replicated dim; nothing is sent."""
    return x


def send(x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    """Give the value to ranks at another coordinate."""
    return x


STEPS: dict[type[CollectiveOp], Callable[..., torch.Tensor]] = {
    AllReduce: all_reduce,
    PsumScatter: psum_scatter,
    AllGather: all_gather,
    AllToAll: all_to_all,
    LocalSlice: take_slice,
    Send: send,
}
for _step in STEPS.values():
    _step.namespace = "torchard"  # type: ignore[attr-defined]  # which says that it keeps no operands


@dataclass(frozen=True)
class Collective(Record):
    """One collective of a plan.

    Attributes:
        kind: all_reduce, psum_scatter, all_gather or all_to_all.
        axes: the mesh axes over which it runs.
        shape: the shape of the largest local operand.
        dtype: the dtype of the operand.
        bytes: the bytes that a rank sends (and receives) under the ring algorithm, uneven shards padded.
        op: the reduction (sum, max or min), if any.
        source, scope, phase: the source line, scope and phase of the operation that needs the result.
        note: what may surprise: that operands are gathered for lack of a factor rule, that neighbours'
            elements are sent, how many collectives are merged in it.
        times: in a table, the number of iterations of the loop around the collective.
    """

    kind: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    op: str | None = None
    source: str = ""
    scope: str = ""
    phase: str = "forward"
    note: str = ""
    times: int = field(default=1, compare=False)

    @classmethod
    def table(cls, records: Sequence[Collective]) -> str:
        """The records as an aligned table with totals."""
        return table(records)

    def __str__(self) -> str:
        return f"{self.kind}({'·'.join(self.axes)}) {list(self.shape)} {_dtype(self.dtype)}"

    def over(self, machine: Machine) -> tuple[tuple[str, ...], Link, int]:
        return self.axes, machine.link_of(self.axes, self.kind), self.bytes

    def in_backward(self) -> Collective:
        return replace(self, phase="backward")

    def in_iteration(self, i: int) -> Collective:
        return replace(self, scope=in_iteration(self.scope, i))

    def repeated(self, times: int) -> Collective:
        return replace(self, times=times)

    @property
    def called(self) -> str:
        """``all_reduce``, or ``all_reduce[max]``."""
        return self.kind if self.op in (None, "sum") else f"{self.kind}[{self.op}]"

    @property
    def title(self) -> str:
        """The title in messages and traces: ``psum_scatter over dp, block/0 backward``."""
        return f"{self.called} over {'·'.join(self.axes)}, {f'{self.scope} {self.phase}'.strip()}"

    @property
    def payload(self) -> str:
        """``128×64 float32, 32,768 bytes per rank``."""
        sent = f"{_shape(self.shape)} {_dtype(self.dtype)}, {self.bytes:,} bytes per rank"
        return f"{sent}, {self.note}" if self.note else sent


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def emit_step(
    graph: fx.Graph, value: fx.Node, step: ReshardStep, near: fx.Node, sizes: Sizes
) -> fx.Node:
    """Append a step to a program's graph, tagged with the operation that needs it."""
    args: dict[str, Any] = {"axes": step.axes}
    if step.reduction is not None:
        args["op"] = step.reduction
    # A reduction is attributed to the producer of its operand, any other step to the consumer.
    owner = near if SOURCE.get(near) and step.reduction is None else value
    target = STEPS[type(step.collective)]
    node = add_call(owner, target, value, graph=graph, val=VAL.of(value), **args)
    put(node, {LAYOUT: step.after.normal(sizes), STEP: step})
    if step.collective.sends:
        COLLECTIVE.set(node, record_of(step, VAL.of(value), owner, sizes, _note(near)))
    return node


def op_of(node: fx.Node) -> CollectiveOp | None:
    """The collective of a node that is a reshard step; None for other nodes."""
    step: ReshardStep | None = STEP.get(node)
    return None if step is None else step.collective


def record_of(
    step: ReshardStep, val: torch.Tensor, near: fx.Node, sizes: Sizes, note: str = ""
) -> Collective:
    """The plan's record of a step, attributed to the node that it serves."""
    axis_sizes = dict(sizes)
    shape = []
    for dim in step.before.dims:
        n = 1
        for sub in dim:
            size = sub.size
            for axis in sub.axes:
                size = -(-size // axis_sizes[axis])
            n *= size
        shape.append(n)
    return Collective(
        step.kind,
        step.axes,
        tuple(shape),
        val.dtype,
        math.ceil(step.elements(sizes) * val.dtype.itemsize),
        step.reduction,
        SOURCE.get(near) or "",
        SCOPE.get(near) or "",
        PHASE.get(near) or "forward",
        note,
    )


def _note(near: fx.Node) -> str:
    if near.op != "call_function" or not VAL.on(near) or not near.all_input_nodes:
        return ""
    if constraint_spec(near) is not None or near.target is operator.getitem:
        return ""
    gathered = lookup(near.target) is None and not STEP.on(near)
    return f"{near.target} has no factor rule, so its operands are gathered" if gathered else ""


def table(records: Sequence[Collective]) -> str:
    """Collectives as an aligned table with totals."""
    noted = any(r.note for r in records)
    head = ("collective", "axes", "shape", "dtype", "bytes/rank", "phase", "scope", "source")
    rows = [(*head, "note") if noted else head]
    for r in records:
        shape, axes = _shape(r.shape), "·".join(r.axes)
        called = r.called if r.times == 1 else f"{r.called} × {r.times}"
        row = (called, axes, shape, _dtype(r.dtype), f"{r.bytes:,}", r.phase, r.scope)
        rows.append((*row, r.source, r.note) if noted else (*row, r.source))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            c.rjust(w) if i == 4 else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))
        ).rstrip()
        for r in rows
    ]
    lines.insert(1, "  ".join("-" * w for w in widths))
    count, total = sum(r.times for r in records), sum(r.bytes * r.times for r in records)
    # A rank sends only what its own stage does, so no rank sends all of a pipeline's.
    summed = ", summed over stages" if any(r.kind == "send" for r in records) else ""
    counted = f"{count} collective{'s' * (count != 1)}"
    return "\n".join([*lines, f"{counted}, {total:,} bytes per rank{summed}"])
