"""Memory of a program: who holds it at the peak, and what allocators need for it.

The peak is read off the list of what runs (functional/remat/liveness.py), what planned memory takes off
its tape (functional/memory). On a mesh it is what one rank runs, the buffers of its collectives included.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchard.functional import torch_internals as internals
from torchard.functional.execution.donated import donated_inputs
from torchard.functional.execution.storages import Allocation, Liveness
from torchard.functional.memory.caching_allocator import CachingAllocator
from torchard.functional.memory.lifetimes import Lifetimes, held
from torchard.functional.memory.plan import (
    MemoryPlan,
    joint_tape_of,
    plan_of_halves,
    plan_of_tape,
    tape_of,
)
from torchard.functional.memory.tape import Step, Tape
from torchard.functional.programs.labels import label_of
from torchard.functional.programs.program import Program, RankGraph
from torchard.functional.programs.records import Record, Records
from torchard.functional.remat.liveness import liveness_of_ranks
from torchard.functional.remat.loop_residuals import with_loop_residuals
from torchard.functional.remat.split import split
from torchard.functional.reports.text import value_text
from torchard.functional.torch_internals.operators import aten, c10d
from torchard.functional.updates.merging import with_updates

__all__ = ["Holder", "Memory", "memory_of"]

_COPIES: frozenset[Any] = frozenset(
    {
        aten.cat.default,
        aten.cat.out,
        aten.clone.default,
        aten.contiguous.default,
        aten.copy_.default,
        aten.reshape.default,
        c10d.all_reduce.default,  # which reduces a copy
    }
)
# Layer numbers: components of scopes that are numbers, and indices in paths.
_NUMBERS = re.compile(r"(?<=/)\d+(?=[/ ]|$)|(?<!args\[)(?<=\[)\d+(?=\])")


@dataclass(frozen=True)
class Holder(Record):
    """Memory that is in use at the peak.

    Attributes:
        bytes: the size.
        kind: ``"argument"``, ``"result"``, ``"collective"`` for a collective's buffer, or ``"value"``.
        what: the path of an argument, or the operation that computes the value.
        value: the value's dtype and shape.
        scope: the scope and the phase.
        source: the user's line.
    """

    bytes: int
    kind: str
    what: str
    value: str
    scope: str
    source: str

    def __str__(self) -> str:
        return "  ".join(filter(None, (f"{self.bytes:,}", *self._cells())))

    def _cells(self) -> tuple[str, ...]:
        return self.kind, self.what, self.value, self.scope, self.source

    def in_any_layer(self) -> Holder:
        """The same in any layer: numbers in paths and scopes are shown as `*`."""
        what = _NUMBERS.sub("*", self.what) if self.kind == "argument" else self.what
        return replace(self, what=what, scope=_NUMBERS.sub("*", self.scope))

    @classmethod
    def table(cls, records: Sequence[Any]) -> str:
        """The largest first; those of equal layers are one line."""
        rows: list[tuple[str, ...]] = [("bytes", "", "kind", "what", "value", "scope", "source")]
        counts = Counter(each.in_any_layer() for each in records)
        for each, n in sorted(counts.items(), key=lambda item: -item[0].bytes * item[1]):
            rows.append((f"{each.bytes * n:,}", f"× {n}" if n > 1 else "", *each._cells()))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join([row[0].rjust(widths[0]), *map(str.ljust, row[1:], widths[1:])]).rstrip()
            for row in rows
        )


@dataclass(frozen=True)
class Memory:
    """The memory that a program needs, in bytes, including its arguments and results.

    Attributes:
        peak: the most bytes in use at once, as ``Program.peak``, if an allocator provides each value.
        holders: the holders of memory at the peak.
        reserved: the bytes that torch's CUDA caching allocator reserves for this sequence, by a model.
        planned: the bytes that planned memory takes: arguments, results, the peak of the bytes that
            operations allocate themselves, and the block.
        block: the block for all other values.
        bound: the most bytes of these values in use at once; no block is smaller. It is no part of the
            peak: sizes are aligned, and an operation may write its result over an operand.
        copied: the bytes that copies write: for concatenations, and for operands of collectives.
        planned_copied: the same bytes in planned memory, where most values are computed in place.
        own: operations that cannot write into given memory, how often each runs, and their bytes.

    >>> import torch, torchard as ta
    >>> def f(x):
    ...     return (x.sin() @ x).cos().sum()
    >>> memory = ta.trace(f)(torch.ones(16, 16)).memory
    >>> memory.peak, memory.block, memory.reserved
    (3072, 2048, 2097152)
    >>> [(holder.bytes, holder.kind, holder.what) for holder in memory.holders]
    [(1024, 'argument', 'args[0]'), (1024, 'value', 'sin'), (1024, 'value', 'mm')]
    """

    peak: int
    holders: Records
    reserved: int
    planned: int
    block: int
    bound: int
    copied: int
    planned_copied: int
    own: dict[str, tuple[int, int]]
    plan: MemoryPlan

    @property
    def fragmentation(self) -> float:
        """The part of what the caching allocator reserves that is not in use at the peak."""
        return 1 - self.peak / self.reserved if self.reserved else 0.0

    def __str__(self) -> str:
        gap = self.block / self.bound if self.bound else 1.0
        lines = [
            f"{self.peak:,} bytes at the peak",
            f"{self.reserved:,} reserved by a caching allocator",
            f"{self.planned:,} in planned memory, whose block is {self.block:,} ({gap:.3f} of the bound)",
        ]
        if self.copied or self.planned_copied:
            lines.append(f"{self.copied:,} copied in a call, {self.planned_copied:,} in planned memory")
        names = [f"{n} × {name} ({size:,})" for name, (n, size) in self.own.items()]
        if names:
            lines.append(f"with separate memory: {', '.join(names)}")
        return "\n".join([*lines, "", str(self.holders)])

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the block over time: a rectangle for each value, from its first to its last use.

        Args:
            path: the file, whose suffix (svg, pdf, png) is the format.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        from torchard.functional.reports.memory_chart import draw_block

        return draw_block(self.plan, path)


def memory_of(program: Program) -> Memory:
    """The memory of a program; of a pipeline, that of the rank that holds most."""
    program = with_updates(program)
    lives = liveness_of_ranks(program)
    number = max(range(len(lives)), key=lambda rank: lives[rank].peak)
    live, donated = lives[number], donated_inputs(program)
    tape, plan = _planned(program, number, donated)
    paths = {
        id(a): leaf.path for a, leaf in zip(live.allocations, program.inputs, strict=False)
    }
    lifetimes = _lives(plan.tape, donated)
    others = [buffer for buffer in lifetimes.all() if not buffer.planned]
    beside = max(held(others, len(plan.tape.steps) + 1))
    own: dict[str, tuple[int, int]] = {}
    for buffer in others:
        if buffer.maker is not None and not buffer.kept and buffer.nbytes:
            n, size = own.get(buffer.maker.label.op, (0, 0))
            own[buffer.maker.label.op] = n + 1, size + buffer.nbytes
    packings = plan.packings.values()
    block = sum(p.size for p in packings)
    return Memory(
        peak=live.peak,
        holders=Records(_holder(a, paths.get(id(a), "")) for a in live.at_peak()),
        reserved=_reserved(live),
        planned=beside + block,
        block=block,
        bound=sum(p.bound for p in packings),
        copied=_copied(tape),
        planned_copied=_copied(plan.tape),
        own=own,
        plan=plan,
    )


def _planned(program: Program, number: int, donated: Sequence[int]) -> tuple[Tape, MemoryPlan]:
    """A rank's computation, with allocated and with planned memory."""
    name, fakes = program.name, internals.FakeTensorMode()
    if not program.is_joint:
        graph, inputs, _ = _rank(program, number)
        tape = tape_of(graph, inputs, fakes, donated)
        return tape, plan_of_tape(tape, name, fakes, donated)
    both = split(with_loop_residuals(program))
    saved, count = both.parts(lambda leaf: 1)
    halves = (_rank(half, number) for half in (both.forward, both.backward))
    (forward, inputs, _), (backward, *_) = halves
    joint = joint_tape_of(forward, backward, inputs, saved, count, fakes)
    return joint.tape, plan_of_halves(joint, name, fakes)


def _rank(program: Program, number: int) -> RankGraph:
    if program.runtime is None:
        return RankGraph.of(program)
    return program.runtime.ranks(program)[number]


def _copied(tape: Tape) -> int:
    """The bytes written by copies, that of an operand which is reduced in place included."""
    return sum(_written_by(step) for step in tape.steps if step.function in _COPIES)


def _written_by(copy: Step) -> int:
    """The bytes that a copy writes: none if it may return its operand, and does."""
    if copy.function is aten.copy_.default:
        return int(copy.args[0].nbytes)
    if copy.function is aten.cat.out:
        return int(copy.kwargs["out"].nbytes)
    (result,) = copy.tensors
    read = set(map(internals.storage_id, copy.operands))
    return 0 if internals.storage_id(result) in read else result.nbytes


def _lives(tape: Tape, donated: Sequence[int]) -> Lifetimes:
    """The buffers of a tape; the caller keeps arguments that are not donated."""
    lifetimes = Lifetimes(tape)
    for i, tensor in enumerate(tape.inputs):
        if i not in donated:
            lifetimes.of(tensor).end = len(tape.steps)
    return lifetimes


def _reserved(live: Liveness) -> int:
    """The bytes that an empty caching allocator reserves for one call."""
    allocator = CachingAllocator()
    begin: dict[int, list[Allocation]] = {}
    end: dict[int, list[Allocation]] = {}
    for each in live.allocations:
        if each.nbytes:
            begin.setdefault(each.begin, []).append(each)
            end.setdefault(each.end, []).append(each)
    addresses: dict[Allocation, int] = {}
    for at in range(-1, len(live.order) + 1):
        for each in begin.get(at, ()):
            addresses[each] = allocator.allocate(each.nbytes)
        for each in end.get(at, ()):
            allocator.free(addresses[each])
    return allocator.reserved


def _holder(storage: Allocation, path: str) -> Holder:
    value = value_text(storage.value)
    if storage.begin < 0:
        return Holder(storage.nbytes, storage.kind, path, value, "", "")
    label = label_of(storage.node).in_iteration(storage.row)
    what = label.op.partition(".")[0]
    return Holder(storage.nbytes, storage.kind, what, value, label.place, label.source)
