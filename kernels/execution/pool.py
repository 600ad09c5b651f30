"""A pool of memory that is reused once nothing else refers to it.

Kernels allocate their results at every call. In the memory of earlier calls they touch no new page.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from sys import getrefcount

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.memory.huge_pages import in_huge_pages

__all__ = ["Pool", "machine_memory"]

# A storage may be larger than asked for, by a quarter.
_SLACK = 1.25
# The number of blocks of one size that a search for a free block examines.
_PROBES = 4


class Pool:
    """A pool of memory on the CPU that is reused once nothing else refers to it.

    Args:
        most: the number of bytes kept. Beyond it, the least recently used memory is freed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._by_size: dict[int, _SameSize] = {}
        self._sizes: list[int] = []  # in order
        self._nbytes = 0
        self._time = 0
        self._lock = threading.Lock()
        _pools.add(self)

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, nbytes: int
    ) -> torch.Tensor:
        """An uninitialised tensor of so many bytes, whose elements have no gaps."""
        with self._lock:
            same = self._by_size.get(nbytes)
            block = same.free() if same else None
            if block is None:
                block = self._near(nbytes) or self._added(nbytes)
            block.used = self._time = self._time + 1
            return internals.in_memory_of(block.base(dtype), shape, strides, 0)

    def after_fork(self) -> None:
        """Reset in the child of a fork: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def release(self) -> None:
        """Drop all memory; storages in use are freed with their users."""
        with self._lock:
            self._by_size.clear()
            self._sizes.clear()
            self._nbytes = 0

    def _near(self, nbytes: int) -> _Block | None:
        """A free block of little more bytes."""
        first = bisect_right(self._sizes, nbytes)
        last = bisect_right(self._sizes, nbytes * _SLACK, first)
        larger = (self._by_size[size].free() for size in self._sizes[first:last])
        return next((block for block in larger if block is not None), None)

    def _added(self, nbytes: int) -> _Block:
        """A new block, for which others are dropped if there are too many bytes."""
        if nbytes > self.most:
            return _Block(nbytes)  # not kept
        self._nbytes += nbytes
        while self._nbytes > self.most:
            self._drop_oldest()
        block = _Block(nbytes)
        if nbytes not in self._by_size:
            insort(self._sizes, nbytes)
            self._by_size[nbytes] = _SameSize()
        self._by_size[nbytes].blocks.append(block)
        return block

    def _drop_oldest(self) -> None:
        size, same = min(
            self._by_size.items(), key=lambda item: min(block.used for block in item[1].blocks)
        )
        block = min(same.blocks, key=lambda block: block.used)
        same.blocks.remove(block)
        self._nbytes -= size
        if not same.blocks:
            del self._by_size[size]
            self._sizes.remove(size)


class _SameSize:
    """The blocks of one size, in the order of their last use.

    What was taken first is mostly given back first, so the first few are looked at, then all; but where
    that finds none it is not done again soon, so that many blocks in use cost no more than a few.
    """

    def __init__(self) -> None:
        self.blocks: deque[_Block] = deque()
        self._wait = 0  # for so many searches, all blocks are taken to be in use

    def free(self) -> _Block | None:
        """A block that nothing refers to, which becomes the last."""
        blocks = self.blocks
        for at in range(min(_PROBES, len(blocks))):
            if blocks[at].is_free():
                break
        else:
            self._wait -= 1
            if self._wait >= 0:
                return None
            # Those that are free come before the others.
            blocks = self.blocks = deque(sorted(blocks, key=lambda block: not block.is_free()))
            if not blocks or not blocks[0].is_free():
                self._wait = len(blocks) // _PROBES
                return None
            at = 0
        block = blocks[at]
        del blocks[at]
        blocks.append(block)
        return block


class _Block:
    """One storage of the pool.

    Attributes:
        used: when it was last taken.
        number: the number of the storage.
    """

    def __init__(self, nbytes: int) -> None:
        self.size = nbytes
        self.used = 0
        with internals.no_modes(), torch.inference_mode(False):
            memory = in_huge_pages(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        self._storage = memory.untyped_storage()
        self.number = internals.storage_number(self._storage)
        self._bases: dict[torch.dtype, torch.Tensor] = {}
        self._count()

    def base(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of a dtype that begins where the storage does; the block is free."""
        base = self._bases.get(dtype)
        if base is None:
            with internals.no_modes(), torch.no_grad(), torch.inference_mode(False):
                base = torch.empty(0, dtype=dtype, device="cpu").set_(self._storage, 0, (0,), (1,))
            self._bases[dtype] = base
            self._count()
        return base

    def is_free(self) -> bool:
        """Whether nothing else refers to the storage. This cannot be known of other processes."""
        return (
            internals.storage_uses(self.number) == self._own
            and getrefcount(self._storage) == self._own_by_python
            and self._storage.nbytes() == self.size
            and not self._storage.is_shared()
        )

    def _count(self) -> None:
        """Note the references of the block itself, by torch and by Python."""
        self._own = internals.storage_uses(self.number)
        self._own_by_python = getrefcount(self._storage)


def machine_memory() -> int:
    """The bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for each in _pools:
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)
