"""What generated code calls: collectors of a loop's values, stacked or summed, and copies to write to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.iterations.recorded import layout_of

__all__ = ["Kept", "Rows", "Total", "copied", "kept", "new_buffer", "taken"]


def new_buffer(value: torch.Tensor, count: int) -> torch.Tensor:
    """Memory for as many values of one shape, none of which is written yet."""
    return value.new_empty((count, *value.shape))


class Rows:
    """Values of all iterations, stacked: written into one buffer as they are computed.

    A value whose write a transform or autograd would have to see is held, and stacked at the end.
    """

    __slots__ = ("buffer", "count", "values", "written")

    def __init__(self, count: int) -> None:
        self.count = count
        self.buffer: torch.Tensor | None = None
        self.written: set[int] = set()
        self.values: dict[int, torch.Tensor] = {}

    def put(self, i: int, value: torch.Tensor) -> None:
        """Add the value of the iteration of row i."""
        if _is_seen(value):
            self.values[i] = value
            return
        if self.buffer is None:
            self.buffer = new_buffer(value, self.count)
        self.buffer[i] = value
        self.written.add(i)

    def get(self) -> torch.Tensor:
        """All rows."""
        if self.buffer is not None and len(self.written) == self.count:
            return self.buffer
        return torch.stack([self._row(i) for i in range(self.count)])

    def _row(self, i: int) -> torch.Tensor:
        """A row, which an iteration has given."""
        if i in self.values:
            return self.values[i]
        assert self.buffer is not None and i in self.written, f"row {i} was not written"
        return self.buffer[i]


class Total:
    """The sum of the values of all iterations, in memory of its own from the second on."""

    __slots__ = ("total", "written")

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.written = False

    def put(self, _: int, value: torch.Tensor) -> None:
        """Add a value."""
        if self.total is None:
            self.total = value
        elif self.written and not _is_seen(value):
            self.total.add_(value)
        else:
            self.total, self.written = self.total + value, True

    def get(self) -> torch.Tensor:
        """The sum."""
        assert self.total is not None  # a loop has an iteration
        return self.total


def _is_seen(value: torch.Tensor) -> bool:
    """Whether what is done with a value is recorded, so that it must not be written elsewhere.

    Within a step of autograd no value is, not even a leaf that requires a gradient.
    """
    return internals.has_transforms() or (torch.is_grad_enabled() and value.requires_grad)


def taken(values: list[torch.Tensor | None] | Kept, i: int) -> torch.Tensor:
    """Take a value out of a list, which does not hold it any longer."""
    value, values[i] = values[i], None
    assert value is not None  # it is taken once
    return value


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the strides that torch's scatters give it.

    torch's `select_scatter`, `slice_scatter` and `diagonal_scatter` copy all of the storage that their
    first operand is in (torch 2.13): for a row of a cache, the whole cache.
    """
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        return x.clone()
    return x.new_empty_strided(x.shape, x.stride()).copy_(x)


class Kept:
    """Values of the iterations of rows from `first` on, one by one, as a list of all rows has them.

    They share memory, which is free when the last one is: what is taken out of it stays there.
    """

    __slots__ = ("first", "stack")

    def __init__(self, stack: torch.Tensor, first: int) -> None:
        self.stack, self.first = stack, first

    @property
    def address(self) -> int:
        """Where the row 0 is, or would be."""
        step = self.stack.stride(0) * self.stack.dtype.itemsize
        return self.stack.data_ptr() - self.first * step

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.stack[i - self.first]

    def __setitem__(self, i: int, value: None) -> None:
        pass


def kept(values: Sequence[torch.Tensor | None]) -> Kept | None:
    """The values of a list, if they are rows of one memory, as those that a native loop has kept are.

    A backward of its own is given such values one by one.
    """
    first = next((i for i, x in enumerate(values) if x is not None), len(values))
    rows = [x for x in values if x is not None]
    if len(rows) < 2 or len(rows) != len(values) - first:
        return None
    one, itemsize = rows[0].detach(), rows[0].dtype.itemsize
    kind, start = (one.shape, one.stride(), one.dtype), one.data_ptr()
    step = rows[1].data_ptr() - start
    end = one.storage_offset() * itemsize + step * (len(rows) - 1) + layout_of(one).bytes
    if step <= 0 or step % itemsize or end > one.untyped_storage().nbytes():
        return None
    for i, x in enumerate(rows):
        if x.data_ptr() != start + i * step or (x.shape, x.stride(), x.dtype) != kind:
            return None
    return Kept(one.as_strided((len(rows), *kind[0]), (step // itemsize, *kind[1])), first)
