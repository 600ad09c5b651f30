"""What generated code collects from the iterations of a loop: stacked rows, and sums."""

from __future__ import annotations

import torch

from torchard.functional import torch_internals as internals

__all__ = ["Rows", "Total", "row_of", "taken"]


class Rows:
    """Values of all iterations, stacked: written into one buffer as they are computed."""

    __slots__ = ("buffer", "count", "values")

    def __init__(self, count: int) -> None:
        self.count = count
        self.buffer: torch.Tensor | None = None
        self.values: dict[int, torch.Tensor] = {}

    def put(self, i: int, value: torch.Tensor) -> None:
        """Add the value of the iteration of row i."""
        if internals.has_transforms() or value.requires_grad:  # buffers are written in place
            self.values[i] = value
            return
        if self.buffer is None:
            self.buffer = value.new_empty((self.count, *value.shape))
        self.buffer[i] = value

    def get(self) -> torch.Tensor:
        """All rows."""
        if self.buffer is not None:
            return self.buffer
        return torch.stack([self.values[i] for i in range(self.count)])


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
        elif self.written and not internals.has_transforms() and not value.requires_grad:
            self.total.add_(value)
        else:
            self.total, self.written = self.total + value, True

    def get(self) -> torch.Tensor:
        """The sum."""
        assert self.total is not None  # a loop has an iteration
        return self.total


def taken(values: list[torch.Tensor | None], i: int) -> torch.Tensor:
    """Take a value out of a list, which does not hold it any longer."""
    value, values[i] = values[i], None
    assert value is not None  # it is taken once
    return value


def row_of(stacked: torch.Tensor, i: int) -> torch.Tensor:
    """A row of stacked values."""
    return stacked[i]
