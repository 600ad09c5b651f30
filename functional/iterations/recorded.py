"""One iteration of compiled code as calls of C functions, on views of numbered buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.iterations.driver import MOST_OPERANDS
from torchard.functional.programs.views import are_dense
from torchard.functional.torch_internals.accessors.native_code import Run, native_calls

__all__ = ["BufferView", "MemoryLayout", "Recorded", "in_order", "layout_of", "recorded"]


class MemoryLayout(NamedTuple):
    """How a value is laid out in memory; strides are in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """The number of elements from the first to the last one, both included."""
        if 0 in self.size:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))

    @property
    def bytes(self) -> int:
        """The memory of the span."""
        return self.span * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill the span, each in a place of its own."""
        return are_dense(self.size, self.stride)

    @property
    def filled(self) -> MemoryLayout:
        """This one if it is dense, else one in order of the dims."""
        return self if self.is_dense else in_order(self.size, self.dtype)

    def empty(self) -> torch.Tensor:
        """A tensor of this layout."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")

    def rows(self, count: int) -> MemoryLayout:
        """The layout of a stack of so many."""
        strides = (math.prod(self.size), *self.stride) if self.is_dense else None
        size = (count, *self.size)
        return in_order(size, self.dtype) if strides is None else MemoryLayout(size, strides, self.dtype)

    @property
    def row(self) -> MemoryLayout:
        """The layout of a row."""
        return MemoryLayout(self.size[1:], self.stride[1:], self.dtype)


def layout_of(x: torch.Tensor) -> MemoryLayout:
    """The layout of a tensor."""
    return MemoryLayout(tuple(x.shape), x.stride(), x.dtype)


def in_order(size: Sequence[int], dtype: torch.dtype) -> MemoryLayout:
    """The layout of a contiguous tensor."""
    return MemoryLayout(tuple(size), torch.empty(tuple(size), device="meta").stride(), dtype)


class BufferView(NamedTuple):
    """A view of a buffer, some bytes from its beginning."""

    buffer: int
    offset: int
    layout: MemoryLayout


class RecordedCall(NamedTuple):
    """A call of a C function on some places; see `NativeCall`."""

    address: int
    places: list[BufferView]
    is_product: bool


class Recorded(NamedTuple):
    """What an iteration calls.

    Attributes:
        inputs: the number of inputs: each is at the beginning of a buffer of its own, the first ones.
        buffers: the bytes of the buffers after these, which are allocated.
        constants: the tensors in whose memory the buffers after these are.
    """

    inputs: int
    steps: list[RecordedCall]
    results: list[BufferView]
    buffers: list[int]
    constants: list[torch.Tensor]


class _Elsewhere(Exception):
    """A tensor is in no known buffer, or its memory is not what it says."""


def recorded(run: Run, inputs: Sequence[torch.Tensor]) -> Recorded | None:
    """What compiled code calls for inputs of these strides; None if it does more than that."""
    copies = list(map(_copied, inputs))
    calls = native_calls(run, copies)
    if calls is None or any(len(call.operands) > MOST_OPERANDS for call in calls.calls):
        return None
    memory = [*copies, *calls.buffers, *calls.constants]
    known = {internals.storage_id(x): i for i, x in reversed([*enumerate(memory)])}

    def place(x: torch.Tensor) -> BufferView:
        buffer = known.get(internals.storage_id(x))
        if buffer is None or x.device.type != "cpu" or x.is_neg() or x.is_conj():
            raise _Elsewhere
        return BufferView(buffer, int(x.storage_offset()) * x.dtype.itemsize, layout_of(x))

    try:
        steps = [
            RecordedCall(call.address, list(map(place, call.operands)), call.is_product)
            for call in calls.calls
        ]
        results = list(map(place, calls.results))
    except _Elsewhere:
        return None
    sizes = [x.untyped_storage().nbytes() for x in calls.buffers]
    return Recorded(len(inputs), steps, results, sizes, calls.constants)


def _copied(x: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor's memory, from its first to its last element."""
    memory = x.as_strided((layout_of(x).span,), (1,)).clone()
    return memory.as_strided(x.shape, x.stride(), 0)
