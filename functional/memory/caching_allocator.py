"""A model of torch's CUDA caching allocator: what it reserves for a sequence of allocations and frees.

After c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, with torch's default settings (no
expandable segments, no limit on splitting), one stream, and no memory given back. Sizes are rounded up to
512 bytes. A request takes the smallest free block that it fits into, from the pool of small
requests (up to 1 MiB) or that of others; if there is none, a segment is reserved. What is left of a block
is split off, unless it is too small to be worth it; a block that is freed is joined with free neighbours
in its segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

__all__ = ["CachingAllocator"]

_MIB = 1 << 20

# In bytes; in brackets, the names in torch's source.
ROUNDED = 512  # kMinBlockSize
SMALL = _MIB  # kSmallSize: the largest request of the pool of small ones
SMALL_SEGMENT = 2 * _MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * _MIB  # kLargeBuffer
LARGE = 10 * _MIB  # kMinLargeAlloc: from here on, a segment has one request's size
ROUNDED_SEGMENT = 2 * _MIB  # kRoundLarge


@dataclass(eq=False)
class _Range:
    """A part of a segment, in a list of neighbours."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: _Range | None = None
    after: _Range | None = None


class CachingAllocator:
    """The state of the allocator.

    Attributes:
        reserved: bytes in segments.
        allocated: bytes in use, each request rounded up.

    >>> from torchard.functional.memory.caching_allocator import CachingAllocator
    >>> allocator = CachingAllocator()
    >>> a, b = allocator.allocate(100), allocator.allocate(3 * 2**20)
    >>> allocator.allocated, allocator.reserved // 2**20
    (3146240, 22)
    >>> allocator.free(b)
    >>> c = allocator.allocate(2**21)
    >>> allocator.reserved // 2**20
    22
    """

    def __init__(self) -> None:
        self.reserved = self.allocated = 0
        # Free ranges by size and address, as torch's sets are ordered, for small and other requests.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._ranges: dict[int, _Range] = {}
        self._next = 0

    def allocate(self, nbytes: int) -> int:
        """Allocate memory.

        Returns:
            Its address.
        """
        size = max(ROUNDED, -(-nbytes // ROUNDED) * ROUNDED)
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        found = self._ranges[free.pop(at)[1]] if at < len(free) else self._segment(size, small)
        rest = found.size - size
        if rest >= ROUNDED if small else rest > SMALL:
            self._split(found, size)
        found.free = False
        self.allocated += found.size
        return found.address

    def free(self, address: int) -> None:
        """Free what was allocated at an address."""
        freed = self._ranges[address]
        self.allocated -= freed.size
        for neighbour in (freed.before, freed.after):
            if neighbour is not None and neighbour.free:
                self._free[freed.small].remove((neighbour.size, neighbour.address))
                freed = self._joined(*sorted((freed, neighbour), key=lambda each: each.address))
        freed.free = True
        insort(self._free[freed.small], (freed.size, freed.address))

    def _segment(self, size: int, small: bool) -> _Range:
        if small:
            reserved = SMALL_SEGMENT
        elif size < LARGE:
            reserved = LARGE_SEGMENT
        else:
            reserved = -(-size // ROUNDED_SEGMENT) * ROUNDED_SEGMENT
        self.reserved += reserved
        segment = self._ranges[self._next] = _Range(self._next, reserved, small)
        self._next += reserved
        return segment

    def _split(self, whole: _Range, size: int) -> None:
        rest = _Range(whole.address + size, whole.size - size, whole.small, True, whole, whole.after)
        if whole.after is not None:
            whole.after.before = rest
        whole.after, whole.size = rest, size
        self._ranges[rest.address] = rest
        insort(self._free[rest.small], (rest.size, rest.address))

    def _joined(self, first: _Range, second: _Range) -> _Range:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._ranges[second.address]
        return first
