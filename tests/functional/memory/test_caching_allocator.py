"""The model of torch's CUDA caching allocator, by the rules that its source has."""

from __future__ import annotations

from random import Random

import pytest

from torchard.functional.memory.caching_allocator import CachingAllocator

MIB = 1 << 20
REQUESTS = [
    (1, 512, 2 * MIB),
    (MIB, MIB, 2 * MIB),
    (MIB + 1, MIB + 512, 20 * MIB),
    (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
    (10 * MIB, 10 * MIB, 10 * MIB),
    (11 * MIB, 12 * MIB, 12 * MIB),  # what is left, 1 MiB, is not split off
    (10 * MIB + MIB // 4, 10 * MIB + MIB // 4, 12 * MIB),
]


@pytest.mark.parametrize(("nbytes", "allocated", "reserved"), REQUESTS)
def test_one_request(nbytes: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(nbytes)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_smallest_block_that_fits() -> None:
    """Two free blocks: the smaller one is taken, whichever was freed last."""
    allocator = CachingAllocator()
    large, between, small, _ = (allocator.allocate(n * MIB) for n in (6, 2, 4, 2))
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(3 * MIB) == small
    assert allocator.allocate(5 * MIB) == large
    assert allocator.reserved == 20 * MIB
    assert between == 6 * MIB


def test_neighbours_are_joined() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(4 * MIB) for _ in range(5)]
    for i in (1, 3, 2):
        allocator.free(blocks[i])
    assert allocator.allocate(12 * MIB) == blocks[1]
    assert allocator.reserved == 20 * MIB


def test_fragmentation() -> None:
    """Free memory in two pieces, neither of which is large enough."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB) for _ in range(4)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    allocator.allocate(8 * MIB)
    assert allocator.allocated == 18 * MIB
    assert allocator.reserved == 40 * MIB


def test_random_sequences() -> None:
    """Blocks never overlap, and all memory is one range per segment once everything is free."""
    rng = Random(0)
    allocator, live = CachingAllocator(), dict[int, int]()
    for _ in range(3000):
        if live and rng.random() < 0.5:
            address = rng.choice(list(live))
            del live[address]
            allocator.free(address)
            continue
        size = int(2 ** rng.uniform(0, 24))
        address = allocator.allocate(size)
        assert all(address + size <= a or a + n <= address for a, n in live.items())
        live[address] = size
        assert sum(live.values()) <= allocator.allocated <= allocator.reserved
    reserved = allocator.reserved
    for address in list(live):
        allocator.free(address)
    assert allocator.allocated == 0
    assert allocator.reserved == reserved
    assert sum(size for free in allocator._free.values() for size, _ in free) == reserved
