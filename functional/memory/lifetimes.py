"""Lifetimes: the buffers of a tape, and from which step to which other one each is in use.

These are no lifetimes of the program as it is (execution/storages.py): a tape's steps write to given
memory and over operands, and a place in a block is free from the last use on, before code drops a value.

A buffer is a storage. What an asynchronous collective reads and writes is in use until it is awaited.
What the caller can hold is never planned: inputs, outputs and what these are views of; nor is what is
given to a function that may keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.spans import Span, bytes_at
from torchard.functional.core.tensor_spec import end_in_storage
from torchard.functional.memory.destinations import ALLOCATIONS
from torchard.functional.memory.tape import Step, Tape, part_of
from torchard.functional.torch_internals.operators import COLLECTIVES, c10d

__all__ = ["Buffer", "Lifetimes", "held"]

# Operators of these namespaces keep none of their operands.
_KEEP_NOTHING = ("aten", "prims", "torchard", "inductor")


@dataclass(eq=False, slots=True)
class Buffer:
    """A storage.

    Attributes:
        begin, end: the first and the last step that uses it; the first is -1 for inputs.
        maker: the step that allocates it; None for inputs.
        value: the first tensor in it.
        kept: whether the caller, or a function, may hold it after the last step that uses it.
        inside: the buffer that it is part of, if it has no memory of its own.
    """

    nbytes: int
    device: torch.device
    begin: int
    end: int
    maker: Step | None
    value: torch.Tensor
    kept: bool = False
    inside: Buffer | None = None

    @property
    def span(self) -> Span:
        """When it is in use, and its bytes."""
        return Span(self.begin, self.end, self.nbytes)

    @property
    def is_allocated(self) -> bool:
        """Whether a step allocates it, and does nothing else."""
        return self.maker is not None and self.maker.function in ALLOCATIONS and self.inside is None

    @property
    def planned(self) -> bool:
        """Whether it has a place in a block: an allocation of which nothing is kept."""
        return self.is_allocated and not self.kept


@dataclass(eq=False)
class Lifetimes:
    """The buffers of a tape."""

    tape: Tape
    # By the number of the storage.
    known: dict[int, Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tensor in self.tape.inputs:
            self._add(tensor, -1, None, kept=True)
        # By the result of a collective under way, what it uses.
        under_way: dict[Buffer, list[Buffer]] = {}
        for at, step in enumerate(self.tape.steps):
            self._step(at, step, under_way)
        last = len(self.tape.steps)
        for tensor in self.tape.outputs:
            if isinstance(tensor, torch.Tensor):
                buffer = self.of(tensor)
                buffer.kept, buffer.end = True, last
        for buffer in (each for used in under_way.values() for each in used):
            buffer.end = last

    def of(self, tensor: torch.Tensor) -> Buffer:
        """The buffer of a tensor."""
        buffer = self.known[internals.storage_id(tensor)]
        while buffer.inside is not None:
            buffer = buffer.inside
        return buffer

    def merge(self, new: Buffer, old: Buffer) -> None:
        """A buffer is part of another one from now on."""
        new.inside = old
        old.begin, old.end = min(old.begin, new.begin), max(old.end, new.end)
        old.kept |= new.kept

    def all(self) -> list[Buffer]:
        """The buffers that have memory of their own, in the order of their creation."""
        return [buffer for buffer in dict.fromkeys(self.known.values()) if buffer.inside is None]

    def planned(self) -> list[Buffer]:
        """The buffers that have a place in a block."""
        return [buffer for buffer in self.all() if buffer.planned]

    def _step(self, at: int, step: Step, under_way: dict[Buffer, list[Buffer]]) -> None:
        read = [self.of(operand) for operand in step.operands]
        for buffer in read:
            buffer.end = at
            buffer.kept |= not _is_known(step.function)
        made = [self._made(result, at, step) for result in step.tensors]
        if step.function is c10d.wait_tensor.default:
            for buffer in under_way.pop(read[0], ()):
                buffer.end = at
        elif getattr(step.function, "namespace", "") == COLLECTIVES:
            (result,) = made or [self.of(step.kwargs.get("out", step.args[0]))]
            under_way.setdefault(result, []).extend((*read, *made))

    def _made(self, result: torch.Tensor, at: int, step: Step) -> Buffer:
        """The buffer of a result; a view of other memory that replaced an allocation is part of that."""
        number = internals.storage_id(result)
        if step.function is part_of:
            base = self.of(step.operands[0])
            if self.known.setdefault(number, base) is base:
                return base
        return self._add(result, at, step)

    def _add(self, tensor: torch.Tensor, at: int, maker: Step | None, kept: bool = False) -> Buffer:
        number = internals.storage_id(tensor)
        new = Buffer(_size_of(tensor, maker), tensor.device, at, at, maker, tensor, kept)
        return self.known.setdefault(number, new)


def _size_of(tensor: torch.Tensor, maker: Step | None) -> int:
    """The bytes of the storage of a tensor.

    Not those of the fake storage, if it is no larger than the tensor: a fake lookup by a number
    (``x[i]``) resizes it (torch 2.13).
    """
    if maker is None or internals.makes_new_memory(maker.function):
        return end_in_storage(tensor) * tensor.itemsize
    return tensor.untyped_storage().nbytes()


def _is_known(function: Any) -> bool:
    # A collective keeps its operands until it is awaited.
    known = (*_KEEP_NOTHING, COLLECTIVES)
    return function is part_of or getattr(function, "namespace", "") in known


def held(buffers: Sequence[Buffer], steps: int) -> list[int]:
    """The bytes in use at each step."""
    return bytes_at((buffer.span for buffer in buffers), steps)
