"""A pool of memory that is reused once nothing else refers to it.

Compiled code allocates its results at every call. In the memory of earlier calls they touch no new page.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.memory.huge_pages import in_huge_pages

__all__ = ["Pool", "empty_strided", "machine_memory", "pool"]

# A storage may be larger than asked for, by a quarter.
_SLACK = 1.25
# How many blocks of a size are looked at in each search for a free one.
_PROBES = 4


class Pool:
    """A pool of memory on the CPU that is reused once nothing else refers to it.

    Args:
        most: the number of bytes kept. Beyond it, the least recently used memory is freed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[_Block, None] = OrderedDict()  # the most recently used is last
        self._by_size: dict[int, _SameSize] = {}
        self._sizes: list[int] = []  # in order
        self._nbytes = 0
        self._lock = threading.Lock()
        _pools.add(self)

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """An uninitialised tensor whose elements have no gaps."""
        with self._lock:
            block = self._block(math.prod(shape) * dtype.itemsize)
            return internals.tensor_in_memory_of(block.base(dtype), shape, strides)

    def after_fork(self) -> None:
        """Reset in the child of a fork: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def release(self) -> None:
        """Drop all memory; storages in use are freed with their users."""
        with self._lock:
            self._kept.clear()
            self._by_size.clear()
            self._sizes.clear()
            self._nbytes = 0

    def _block(self, nbytes: int) -> _Block:
        """A block of at least so many bytes, and little more, that nothing refers to."""
        block = next((b for blocks in self._fitting(nbytes) if (b := blocks.free())), None)
        if block is None:
            block = self._added(nbytes)
        self._kept[block] = None
        self._kept.move_to_end(block)
        while self._kept and self._nbytes > self.most:
            self._drop(next(iter(self._kept)))
        return block

    def _fitting(self, nbytes: int) -> Iterator[_SameSize]:
        first = bisect_left(self._sizes, nbytes)
        last = bisect_right(self._sizes, nbytes * _SLACK, first)
        return (self._by_size[size] for size in self._sizes[first:last])

    def _added(self, nbytes: int) -> _Block:
        if nbytes not in self._by_size:
            insort(self._sizes, nbytes)
            self._by_size[nbytes] = _SameSize()
        block = _Block(nbytes)
        self._by_size[nbytes].blocks.append(block)
        self._nbytes += nbytes
        return block

    def _drop(self, block: _Block) -> None:
        del self._kept[block]
        self._nbytes -= block.size
        same = self._by_size[block.size].blocks
        same.remove(block)
        if not same:
            del self._by_size[block.size]
            self._sizes.remove(block.size)


class _SameSize:
    """The blocks of one size, in the order of their last use.

    What was taken first is mostly given back first, so the first few are looked at. All of them are
    looked at once in as many searches that their number does not matter, and those that are free put
    before the others: of a thousand values that are kept, no search finds its way through each.
    """

    def __init__(self) -> None:
        self.blocks: deque[_Block] = deque()
        self._looked_at = 0

    def free(self) -> _Block | None:
        """A block that nothing refers to, which becomes the last."""
        self._looked_at += _PROBES
        if self._looked_at >= len(self.blocks):
            self._looked_at = 0
            self.blocks = deque(sorted(self.blocks, key=lambda block: not block.is_free()))
        for at, block in enumerate(islice(self.blocks, _PROBES)):
            if block.is_free():
                del self.blocks[at]
                self.blocks.append(block)
                return block
        return None


class _Block:
    """One storage of the pool."""

    def __init__(self, nbytes: int) -> None:
        self.size = nbytes
        with internals.no_modes(), torch.inference_mode(False):
            memory = in_huge_pages(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        self._storage = memory.untyped_storage()
        self._bases: dict[torch.dtype, torch.Tensor] = {}
        self._unused = self._references()

    def base(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of a dtype that begins where the storage does; the block is free."""
        base = self._bases.get(dtype)
        if base is None:
            with internals.no_modes(), torch.no_grad(), torch.inference_mode(False):
                base = torch.empty(0, dtype=dtype, device="cpu").set_(self._storage, 0, (0,), (1,))
            self._bases[dtype] = base
            self._unused = self._references()
        return base

    def is_free(self) -> bool:
        """Whether nothing else refers to the storage. This cannot be known of other processes."""
        return (
            self._unused is not None
            and self._references() == self._unused
            and self._storage.nbytes() == self.size
            and not self._storage.is_shared()
        )

    def _references(self) -> tuple[int, int] | None:
        """The reference counts of torch and Python; None if unknown, so nothing is ever free."""
        uses = internals.storage_uses(self._storage)
        return None if uses is None else (uses, sys.getrefcount(self._storage))


def machine_memory() -> int:
    """The bytes of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _after_fork() -> None:
    for each in _pools:
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)

pool = Pool(machine_memory() // 4)
"""What compiled programs in planned memory allocate their results from."""

# Bytes; smaller allocations take less time than a search.
_LEAST = 1 << 10


def empty_strided(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """An uninitialised tensor on the CPU, in memory of the pool; its elements have no gaps."""
    if math.prod(shape) * dtype.itemsize < _LEAST or not _is_dense(shape, strides):
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    return pool.empty(shape, strides, dtype)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the last element is that of as many elements without gaps."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return last + 1 == math.prod(shape)
