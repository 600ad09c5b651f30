"""Memory of a program: who holds it at the peak, and what allocators need for it.

Everything is read from the tapes of what runs (functional/memory): of the program as it is, whose values
come from an allocator, and in planned memory. Over a mesh it is what one rank runs, the buffers of its
collectives included.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.memory.caching_allocator import CachingAllocator
from torchard.functional.memory.lifetimes import Buffer, Lifetimes, held
from torchard.functional.memory.plan import (
    MemoryPlan,
    joint_tape_of,
    plan_of_halves,
    plan_of_tape,
    tape_of,
)
from torchard.functional.memory.tape import Step, Tape
from torchard.functional.programs.program import Program, RankGraph
from torchard.functional.programs.records import Record, Records
from torchard.functional.remat.liveness import donated_inputs
from torchard.functional.remat.loop_residuals import with_loop_residuals
from torchard.functional.remat.split import split
from torchard.functional.reports.text import value_text
from torchard.functional.torch_internals.operators import aten, c10d

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
# Of layers: whole parts of scopes, and indices in paths.
_NUMBERS = re.compile(r"(?<=/)\d+(?=[/ ]|$)|(?<!args\[)(?<=\[)\d+(?=\])")


@dataclass(frozen=True)
class Holder(Record):
    """Memory that is in use at the peak.

    Attributes:
        bytes: its size.
        kind: ``"argument"``, ``"result"``, ``"collective"`` for a buffer of one, or ``"value"``.
        what: the path of an argument, or the operation that computes the value.
        value: its dtype and shape.
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
    """The memory that a program needs, in bytes, of its arguments and results too.

    Attributes:
        peak: the most that is in use at once, if each value is freed after its last use.
        holders: who holds it then.
        reserved: what torch's CUDA caching allocator reserves for the same sequence, by a model of it.
        planned: what planned memory takes: arguments, results, what operations allocate themselves at
            its peak, and the block.
        block: the block for all other values.
        bound: the most bytes of these in use at once; no block is smaller.
        copied: what is written by copies alone: of concatenations, and of operands of collectives.
        planned_copied: the same in planned memory, where most are computed in their places.
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
            lines.append(f"with memory of their own: {', '.join(names)}")
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
    """The memory of a program; of a pipeline, that of the rank that needs most."""
    return max(_reports(program), key=lambda report: report.peak)


def _reports(program: Program) -> Iterator[Memory]:
    """The memory of each rank that may need another amount than others."""
    name, fakes = program.name, internals.FakeTensorMode()
    if any(leaf.role == "cotangent" for leaf in program.inputs):
        both = split(with_loop_residuals(program))
        saved, count = both.parts(lambda leaf: 1)
        for one, two in zip(_ranks(both.forward), _ranks(both.backward), strict=True):
            joint = joint_tape_of(one.graph, two.graph, one.inputs, saved, count, fakes)
            yield _memory(program, joint.tape, plan_of_halves(joint, name, fakes), ())
        return
    donated = donated_inputs(program)
    for graph, inputs in _ranks(program):
        tape = tape_of(graph, inputs, fakes)
        yield _memory(program, tape, plan_of_tape(tape, name, fakes, donated), donated)


def _ranks(program: Program) -> Sequence[RankGraph]:
    return [RankGraph.of(program)] if program.runtime is None else program.runtime.ranks(program)


def _memory(program: Program, tape: Tape, plan: MemoryPlan, donated: Sequence[int]) -> Memory:
    lifetimes = _lives(tape, donated)
    lives, steps = lifetimes.all(), len(tape.steps) + 1
    totals = held(lives, steps)
    at = max(range(len(totals)), key=totals.__getitem__)
    paths = {id(x): leaf.path for x, leaf in zip(tape.inputs, program.inputs, strict=False)}
    kinds = _kinds(tape, lifetimes)
    holding = [buffer for buffer in lives if buffer.begin <= at <= buffer.end and buffer.nbytes]
    holders = [_holder(buffer, paths, kinds.get(buffer, "value")) for buffer in holding]
    others = [buffer for buffer in _lives(plan.tape, donated).all() if not buffer.planned]
    beside = max(held(others, len(plan.tape.steps) + 1))
    own: dict[str, tuple[int, int]] = {}
    for buffer in others:
        if buffer.maker is not None and not buffer.kept and buffer.nbytes:
            n, size = own.get(buffer.maker.label.op, (0, 0))
            own[buffer.maker.label.op] = n + 1, size + buffer.nbytes
    packings = plan.packings.values()
    block, bound = sum(p.size for p in packings), sum(p.bound for p in packings)
    reserved = _reserved(lives, steps)
    copied = _copied(tape), _copied(plan.tape)
    return Memory(
        totals[at], Records(holders), reserved, beside + block, block, bound, *copied, own, plan
    )


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


def _kinds(tape: Tape, lifetimes: Lifetimes) -> dict[Buffer, str]:
    """What some buffers are."""
    kinds: dict[Buffer, str] = {}
    for step in tape.steps:
        if step.label.collective is not None:
            kinds.update((lifetimes.of(x), "collective") for x in (*step.operands, *step.tensors))
    kinds.update((lifetimes.of(x), "result") for x in tape.outputs if isinstance(x, torch.Tensor))
    kinds.update((lifetimes.of(x), "argument") for x in tape.inputs)
    return kinds


def _reserved(buffers: Sequence[Buffer], steps: int) -> int:
    """What a caching allocator reserves, beginning with none, for one call."""
    allocator = CachingAllocator()
    begin: dict[int, list[Buffer]] = {}
    end: dict[int, list[Buffer]] = {}
    for buffer in buffers:
        if buffer.nbytes:
            begin.setdefault(buffer.begin, []).append(buffer)
            end.setdefault(buffer.end, []).append(buffer)
    addresses: dict[Buffer, int] = {}
    for at in range(-1, steps):
        for buffer in begin.get(at, ()):
            addresses[buffer] = allocator.allocate(buffer.nbytes)
        for buffer in end.get(at, ()):
            allocator.free(addresses[buffer])
    return allocator.reserved


def _holder(buffer: Buffer, paths: dict[int, str], kind: str) -> Holder:
    step, value = buffer.maker, value_text(buffer.value)
    if step is None:
        return Holder(buffer.nbytes, kind, paths.get(id(buffer.value), ""), value, "", "")
    label = step.label
    what = label.op.partition(".")[0]
    return Holder(buffer.nbytes, kind, what, value, label.place, label.source)
