"""Planned programs: a graph bound to run in planned memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.locks import Lock
from torchard.functional.memory.arena import arena
from torchard.functional.memory.destinations import with_destinations
from torchard.functional.memory.lifetimes import Buffer, Lifetimes
from torchard.functional.memory.packing import Packing, Span, pack
from torchard.functional.memory.planned_code import PlannedCode
from torchard.functional.memory.results import with_results_apart
from torchard.functional.memory.reuse import with_reuse
from torchard.functional.memory.tape import Tape, recorded
from torchard.functional.programs.program import Bound

__all__ = ["MemoryPlan", "Planned", "plan_of", "poisoned"]


@dataclass(eq=False)
class MemoryPlan:
    """Where the values of a program are, for inputs of certain strides.

    Attributes:
        tape: the calls of the program, in destination-passing style.
        packings: by device, the packing of its planned buffers.
    """

    tape: Tape
    lifetimes: Lifetimes
    packings: dict[torch.device, Packing]
    code: PlannedCode

    @property
    def sizes(self) -> dict[torch.device, int]:
        """The bytes of a block, by device."""
        return {device: packing.size for device, packing in self.packings.items()}


def plan_of(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], name: str, donated: Sequence[int] = ()
) -> MemoryPlan:
    """The plan of a graph for inputs like these.

    Args:
        inputs: their values are not read.
        name: the program's name, for messages.
        donated: the positions of inputs whose memory the program may take.
    """
    fakes = internals.FakeTensorMode()
    tape = with_results_apart(recorded(graph, inputs, name, fakes), fakes)
    given = [tape.inputs[i] for i in donated]
    tape = with_destinations(tape, given, fakes)
    tape = with_reuse(tape, given)
    lifetimes = Lifetimes(tape)
    by_device: dict[torch.device, list[Buffer]] = {}
    for buffer in lifetimes.planned():
        by_device.setdefault(buffer.device, []).append(buffer)
    packings = {
        device: pack([Span(b.begin, b.end, b.nbytes) for b in own])
        for device, own in by_device.items()
    }
    offsets = {
        buffer: offset
        for device, own in by_device.items()
        for buffer, offset in zip(own, packings[device].offsets, strict=True)
    }
    code = PlannedCode(tape, lifetimes, offsets, name, _poisoned)
    return MemoryPlan(tape, lifetimes, packings, code)


_poisoned = False


@contextmanager
def poisoned() -> Iterator[None]:
    """A context for tests: programs overwrite memory that is not in use."""
    global _poisoned
    before, _poisoned = _poisoned, True
    try:
        yield
    finally:
        _poisoned = before


class Planned:
    """A graph in planned memory; it is planned at its first call, and again for inputs of other strides.

    Args:
        graph: what this process runs.
        donated: the positions of inputs whose memory the program may take, if nothing else holds it.
        generated: the same program with allocated memory, for callers that must see its operations.
    """

    def __init__(
        self, graph: fx.Graph, generated: Bound, name: str, donated: Sequence[int] = ()
    ) -> None:
        self.graph, self.generated, self.name = graph, generated, name
        self.donated = donated
        self._plans: dict[Any, MemoryPlan] = {}
        self._lock = Lock()

    def plan(self, parts: Sequence[torch.Tensor]) -> MemoryPlan:
        """The plan for inputs like these."""
        given = bool(self.donated) and all(_is_owned(parts, i) for i in self.donated)
        key = _poisoned, given, *[part.stride() for part in parts]
        plan = self._plans.get(key)
        if plan is None:
            with self._lock:
                plan = self._plans.get(key)
                if plan is None:
                    donated = self.donated if given else ()
                    plan = self._plans[key] = plan_of(self.graph, parts, self.name, donated)
        return plan

    def __call__(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if internals.has_modes() or internals.has_transforms():
            return self.generated(parts)
        plan = self.plan(parts)
        with arena.lent(plan, plan.sizes) as block:
            return block.made_for(plan, plan.code.bound)(parts)


def _is_owned(parts: Sequence[torch.Tensor], i: int) -> bool:
    """Whether nothing but a list holds an input and its memory, all of which is the input's."""
    if sys.getrefcount(parts[i]) > _OWNED:
        return False
    part = parts[i]
    storage = part.untyped_storage()
    return (
        internals.storage_uses(storage) == _USES
        and storage.nbytes() == part.nbytes
        and part.is_contiguous()
    )


def _counts() -> tuple[int, int]:
    """The references to a tensor in a list as `_is_owned` sees them, and to its storage."""
    parts = [torch.empty(1)]
    uses = internals.storage_uses(parts[0].untyped_storage())
    return sys.getrefcount(parts[0]), -1 if uses is None else uses


_OWNED, _USES = _counts()
