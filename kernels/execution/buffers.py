"""Memory for large results on a CPU.

The first access to each page of a new allocation is a fault, and faults take longer than most kernels. So
memory that is no longer referenced is reused, as torch's allocator does on a GPU, and new memory is in
huge pages (functional/memory/huge_pages.py).
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.memory.huge_pages import in_huge_pages

__all__ = ["Buffers", "Pool", "is_large", "release"]

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
        return Buffers(tuple(BufferLayout(tuple(v.shape), v.stride(), v.dtype) for v in values))

    @property
    def dense(self) -> bool:
        """Whether all layouts are dense."""
        return all(layout.dense for layout in self.layouts)

    def new(self, device: torch.device) -> list[torch.Tensor]:
        """New uninitialised tensors."""
        return [_empty(layout, device) for layout in self.layouts]


def _empty(layout: BufferLayout, device: torch.device) -> torch.Tensor:
    shape, strides, dtype = layout.shape, layout.strides, layout.dtype
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE or device.type != "cpu" or not layout.dense:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    storage = _pool.take(nbytes)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)


def release() -> None:
    """Free the memory that is kept for large results on a CPU and is not in use.

    >>> from torchard import kernels
    >>> kernels.release()
    """
    _pool.release()


class Pool:
    """A pool of memory that is reused once nothing else refers to it.

    Args:
        most: the number of bytes kept. Beyond it, the least recently used memory is freed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._blocks: list[_Block] = []  # the most recently used is last
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of at least so many bytes, and little more."""
        with self._lock:
            fitting = (b for b in self._blocks if nbytes <= b.size <= nbytes * _SLACK)
            block = next((b for b in fitting if b.is_free()), None)
            if block is None:
                block = _Block(nbytes)
            else:
                self._blocks.remove(block)
            self._blocks.append(block)
            while self._blocks and sum(b.size for b in self._blocks) > self.most:
                del self._blocks[0]
            return block.storage

    def after_fork(self) -> None:
        """Reset in the child of a fork: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def release(self) -> None:
        """Drop all memory; storages in use are freed with their users."""
        with self._lock:
            self._blocks.clear()


class _Block:
    """One storage of the pool."""

    def __init__(self, nbytes: int) -> None:
        self.size = nbytes
        self.storage = in_huge_pages(_bytes(nbytes)).untyped_storage()
        self._unused = self._references()

    def is_free(self) -> bool:
        """Whether nothing else refers to the storage. This cannot be known of other processes."""
        return (
            self._unused is not None
            and self._references() == self._unused
            and self.storage.nbytes() == self.size
            and not self.storage.is_shared()
        )

    def _references(self) -> tuple[int, int] | None:
        """The reference counts of torch and Python; None if unknown, so nothing is ever free."""
        uses = internals.storage_uses(self.storage)
        return None if uses is None else (uses, sys.getrefcount(self.storage))


# A storage may be larger than asked for, by a quarter.
_SLACK = 1.25


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


# An eighth of the machine's memory.
_pool = Pool(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8)
os.register_at_fork(after_in_child=lambda: _pool.after_fork())
