"""Memory for large results on a CPU.

The first access to each page of a new allocation is a fault, and faults take longer than most kernels. So
memory that is no longer referenced is reused, as torch's allocator does on a GPU, and new memory is in
huge pages (pool.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchard.kernels.execution.pool import Pool, machine_memory

__all__ = ["Buffers", "is_large", "release", "reused"]

# Bytes; smaller allocations come from memory that the process already has.
LARGE = 1 << 22


def is_large(tensor: torch.Tensor) -> bool:
    """Whether a tensor is large enough for its pages to matter."""
    return tensor.nbytes >= LARGE


@dataclass(frozen=True)
class BufferLayout:
    """The storage layout of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: torch.Tensor) -> BufferLayout:
        """The layout of a tensor."""
        return BufferLayout(tuple(value.shape), value.stride(), value.dtype)

    @property
    def dense(self) -> bool:
        """Whether elements do not overlap and have no gaps between them."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Buffers:
    """A factory of tensors with given layouts."""

    layouts: tuple[BufferLayout, ...]

    @staticmethod
    def of(values: Sequence[torch.Tensor]) -> Buffers:
        """A factory of tensors with the layouts of these."""
        return Buffers(tuple(map(BufferLayout.of, values)))

    @property
    def dense(self) -> bool:
        """Whether all layouts are dense."""
        return all(layout.dense for layout in self.layouts)

    def new(self, device: torch.device) -> list[torch.Tensor]:
        """New uninitialised tensors."""
        return [_empty(layout, device) for layout in self.layouts]


def reused(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor with the layout of another one, such as one on the meta device."""
    return _empty(BufferLayout.of(like), device)


def _empty(layout: BufferLayout, device: torch.device) -> torch.Tensor:
    shape, strides, dtype = layout.shape, layout.strides, layout.dtype
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE or device.type != "cpu" or not layout.dense:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return _pool.empty(shape, strides, dtype, nbytes)


def release() -> None:
    """Free the memory that is reserved for large results on a CPU and is not in use.

    >>> from torchard import kernels
    >>> kernels.release()
    """
    _pool.release()


# An eighth of the machine's memory.
_pool = Pool(machine_memory() // 8)
