"""A pool of memory that is reused once nothing else refers to it.

Compiled code allocates its results and intermediates at every call. Large ones in the memory of earlier
calls touch no new page.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Sequence

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.memory.huge_pages import in_huge_pages

__all__ = ["Pool", "empty_strided", "machine_memory", "pool"]


class Pool:
    """A pool of memory that is reused once nothing else refers to it.

    Args:
        most: the number of bytes kept. Beyond it, the least recently used memory is freed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._blocks: list[_Block] = []  # the most recently used is last
        self._lock = threading.Lock()
        _pools.add(self)

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




def machine_memory() -> int:
    """The bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for each in _pools:
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)

# Smaller allocations come from memory that the process already has, in less time than a search takes.
_LEAST = 1 << 20

pool = Pool(machine_memory() // 4)
"""What compiled programs in planned memory allocate from."""


def empty_strided(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """An uninitialised tensor on the CPU, in memory of the pool; its elements have no gaps."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _LEAST or not _is_dense(shape, strides):
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    return torch.empty(0, dtype=dtype, device="cpu").set_(pool.take(nbytes), 0, shape, strides)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the last element is that of as many elements without gaps."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return last + 1 == math.prod(shape)
