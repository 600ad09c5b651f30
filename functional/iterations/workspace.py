"""The memory of a native loop's iterations, and what the driver calls there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from torchard.functional.iterations.collecting import Kept, Rows, Total
from torchard.functional.iterations.driver import Driver, Pointer
from torchard.functional.iterations.recorded import BufferView, MemoryLayout, Recorded, in_order
from torchard.functional.torch_internals.accessors.native_code import Handle

__all__ = ["Collected", "LoopValue", "NativeIteration", "Workspace"]

_ALIGNED = 64  # bytes


class LoopValue(NamedTuple):
    """A value of an iteration: a row of a source, a source itself, a carry, or a result of the region."""

    kind: Literal["row", "whole", "carry", "result"]
    number: int


class Collected(NamedTuple):
    """A value that is collected: in a list, in a stack of rows, or as a sum."""

    kind: Literal["list", "rows", "total"]
    value: LoopValue


class NativeIteration(NamedTuple):
    """What an iteration calls, and where it leaves its results.

    Attributes:
        operands: the inputs of the recorded calls.
        carries: by carry, its value in the next iteration.
        collected: the values that are collected.
        order: the rows of the iterations; None if a carry says whether there is another one.
        going: this carry.
        sources: the layouts of what rows are of, and of values that all iterations read.
        homes: the layouts of carries.
    """

    calls: Recorded
    operands: Sequence[LoopValue]
    carries: Sequence[LoopValue]
    collected: Sequence[Collected]
    order: range | None
    going: int
    sources: Sequence[MemoryLayout]
    homes: Sequence[MemoryLayout]

    def layout(self, value: LoopValue) -> MemoryLayout:
        """The layout of a value."""
        match value.kind:
            case "result":
                return self.calls.results[value.number].layout
            case "carry":
                return self.homes[value.number]
            case "whole":
                return self.sources[value.number]
            case "row":
                return self.sources[value.number].row


class Workspace:
    """Memory for one run at a time, and the calls that use it.

    What a run reads, and where it collects, are bases of the driver: first the sources, then the
    collectors, then handles of sources. Everything else is in one block of memory.
    """

    def __init__(self, iteration: NativeIteration) -> None:
        self.iteration, self.driver = iteration, Driver()
        sizes = [home.bytes for home in iteration.homes] + iteration.calls.buffers
        self._offsets = [0, *itertools.accumulate(-(-n // _ALIGNED) * _ALIGNED for n in sizes)]
        self._block = torch.empty(self._offsets[-1], dtype=torch.uint8, device="cpu")
        self._kept: list[Any] = []  # copies of rows and carries, and handles
        self._handled: list[tuple[int, int, MemoryLayout]] = []  # a source, bytes from there, a layout
        self._handles: list[Handle] = []  # of these, in the last run
        self._addresses: list[int] = []  # where they were
        self.carries = list(map(self._carry, range(len(iteration.homes))))
        for address, places, is_product in iteration.calls.steps:
            operands = list(map(self._place, places))
            if is_product:
                handles = [self._handle(x, p.layout) for x, p in zip(operands, places, strict=True)]
                self.driver.product(address, handles)
            else:
                self.driver.kernel(address, operands)
        for i, each in enumerate(iteration.collected, len(iteration.sources)):
            self._collect(each, i)
        self._hand_on()

    def run(
        self, sources: Sequence[Any], carries: Sequence[torch.Tensor], collectors: Sequence[Any]
    ) -> list[Any] | None:
        """All iterations; see `NativeLoop`. None if a call failed."""
        iteration, order = self.iteration, self.iteration.order
        for home, carry in zip(self.carries, carries, strict=True):
            home.copy_(carry)
        memory = [self._memory(*x) for x in zip(iteration.collected, collectors, strict=True)]
        bases = [x.address if isinstance(x, Kept) else x.data_ptr() for x in (*sources, *memory)]
        bases += self._numbers(bases)
        if order is None:
            ran = self.driver.run(bases, None, self.carries[iteration.going].data_ptr())
        else:
            ran = self.driver.run(bases, len(order))
        if not ran:
            return None
        for x, collector in zip(memory, collectors, strict=True):
            if isinstance(collector, Total):
                collector.total, collector.written = x, True
            elif isinstance(collector, Rows):
                collector.written.update(order or ())
        return [home.clone() for home in self.carries] + [x for x in memory if isinstance(x, Kept)]

    # -- where values are -------------------------------------------------------------------------

    def _carry(self, c: int) -> torch.Tensor:
        home, start = self.iteration.homes[c], self._offsets[c]
        flat = self._block[start : start + home.bytes].view(home.dtype)
        return flat.as_strided(home.size, home.stride)

    def _value(self, value: LoopValue) -> Pointer:
        if value.kind == "result":
            return self._place(self.iteration.calls.results[value.number])
        if value.kind == "carry":
            return Pointer(None, self.carries[value.number].data_ptr())
        if value.kind == "whole":
            return Pointer(value.number, 0)
        return self._row(value.number, self.iteration.sources[value.number])

    def _row(self, base: int, stack: MemoryLayout) -> Pointer:
        """The row of an iteration in a base."""
        order, step = self.iteration.order, stack.stride[0] * stack.dtype.itemsize
        assert order is not None  # what has rows has a known number of iterations
        return Pointer(base, order.start * step, order.step * step)

    def _place(self, place: BufferView) -> Pointer:
        calls = self.iteration.calls
        if place.buffer < calls.inputs:
            pointer = self._value(self.iteration.operands[place.buffer])
            return pointer._replace(at=pointer.at + place.offset)
        number = place.buffer - calls.inputs
        if number < len(calls.buffers):
            start = self._block.data_ptr() + self._offsets[len(self.carries) + number]
        else:
            constant = calls.constants[number - len(calls.buffers)]
            start = constant.untyped_storage().data_ptr()
        return Pointer(None, start + place.offset)

    # -- what is called besides kernels -----------------------------------------------------------

    def _handle(self, x: Pointer, layout: MemoryLayout) -> Pointer:
        """A handle of a value; of a row, of a copy that is always in one place."""
        if x.step:
            x, layout = self._copied(x, layout)
        if x.base is not None:
            self._handled.append((x.base, x.at, layout))
            bases = len(self.iteration.sources) + len(self.iteration.collected)
            return Pointer(bases + len(self._handled) - 1, 0)
        handle = Handle(x.at, *layout)
        self._kept.append(handle)
        return Pointer(None, handle.number)

    def _numbers(self, bases: Sequence[int]) -> list[int]:
        """The handles of sources, which are made anew when the sources are elsewhere."""
        addresses = [bases[base] + at for base, at, _ in self._handled]
        if addresses != self._addresses:
            layouts = [layout for *_, layout in self._handled]
            self._handles = [Handle(x, *y) for x, y in zip(addresses, layouts, strict=True)]
            self._addresses = addresses
        return [handle.number for handle in self._handles]

    def _copied(self, x: Pointer, layout: MemoryLayout) -> tuple[Pointer, MemoryLayout]:
        """A copy that each iteration makes of a value."""
        ordered = in_order(layout.size, layout.dtype)
        copy = ordered.empty()
        self._kept.append(copy)
        to = Pointer(None, copy.data_ptr())
        self._copy(to, ordered, x, layout)
        return to, ordered

    def _copy(self, to: Pointer, there: MemoryLayout, x: Pointer, here: MemoryLayout) -> None:
        kept = [d for d, n in enumerate(here.size) if n != 1]
        strides = [there.stride[d] for d in kept], [here.stride[d] for d in kept]
        if strides[0] == strides[1] and here.is_dense:
            self.driver.copy(to, x, here.bytes)
        else:
            size, itemsize = [here.size[d] for d in kept], here.dtype.itemsize
            self.driver.move(to, x, size, strides, itemsize)

    def _hand_on(self) -> None:
        """Copy the values of the next iteration to the carries, as if all at once."""
        values = self.iteration.carries
        first = self._block.data_ptr()
        last = first + self._offsets[len(values)]
        handed = [LoopValue("carry", c) for c in range(len(values))]
        homes, found = (
            [(self._value(value), self.iteration.layout(value)) for value in each]
            for each in (handed, values)
        )
        for i, (x, home) in enumerate(zip(found, homes, strict=True)):
            if x != home and x[0].base is None and first <= x[0].at < last:
                found[i] = self._copied(*x)
        for x, home in zip(found, homes, strict=True):
            if x != home:
                self._copy(*home, *x)

    # -- what is collected ------------------------------------------------------------------------

    def _memory(self, collected: Collected, collector: Any) -> Any:
        """Where a run collects a value."""
        layout, order = self.iteration.layout(collected.value), self.iteration.order
        if isinstance(collector, Total):
            return _beginning(collector, layout)
        if isinstance(collector, Rows):
            if collector.buffer is None:
                collector.buffer = in_order((collector.count, *layout.size), layout.dtype).empty()
            return collector.buffer
        assert order is not None  # what collects has a known number of iterations
        first = min(order)
        return Kept(layout.rows(max(order) - first + 1).empty(), first)

    def _collect(self, collected: Collected, base: int) -> None:
        """Collect a value in each iteration."""
        value = collected.value
        x, layout = self._value(value), self.iteration.layout(value)
        if collected.kind == "total":
            count = math.prod(layout.size)
            return self.driver.add(Pointer(base, 0), x, layout.dtype, count)
        ordered = in_order((1, *layout.size), layout.dtype)
        stack = layout.rows(1) if collected.kind == "list" else ordered
        self._copy(self._row(base, stack), stack.row, x, layout)


def _beginning(collector: Total, layout: MemoryLayout) -> torch.Tensor:
    """The sum before the first iteration, in memory of its own."""
    total = layout.empty()
    if collector.total is not None:
        return total.copy_(collector.total)
    # A value that is added to this is not changed.
    return total.fill_(-0.0 if layout.dtype.is_floating_point else 0)
