"""Packing: offsets for buffers with known lifetimes, in a block that is as small as possible.

This is dynamic storage allocation, which is NP-hard (Garey and Johnson 1979, SR2). No packing is smaller
than the most bytes in use at once, so the ratio of the two bounds what is lost.

Buffers are placed one after another, each in the lowest gap that it fits into. What decides is the
order: those by size, by duration, by area and by time are tried (Pisarchyk and Lee 2020,
arXiv:2001.03288). If the best packing is not close to the bound, the buffer at the top of the block is
moved earlier in the order, to a random place, and the order is kept if it is no worse ("squeaky wheel"
optimization, Joslin and Clements 1999). Only buffers of some size are searched; the others fit between
them. For the programs of benchmarks/planned_memory.py an exact search, as in MiniMalloc (Moffitt and
others, ASPLOS 2024, doi:10.1145/3623278.3624752), would gain a hundredth at most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from torchard.functional.core.spans import Span, bytes_at

__all__ = ["ALIGNMENT", "Packing", "pack"]

ALIGNMENT = 64
"""Bytes: a cache line, and what vector instructions load at once."""
# Bytes: sizes of which those that are multiples of a page are kept apart. It costs a thousandth.
_LARGE, _PAGE = 1 << 16, 1 << 12
# A packing is good enough if it is larger than the bound by less than one part in so many; and buffers
# that are smaller than this part of the bound are placed last, without a search.
_CLOSE, _SMALL = 1000, 500
# The most comparisons of buffers in all searches together, about two seconds; the number of searches, and
# the most moves of each search.
_COMPARISONS, _STARTS, _MOVES = 250_000_000, 5, 200


@dataclass(frozen=True)
class Packing:
    """Where each of some spans begins.

    Attributes:
        offsets: the offset of each span, in bytes.
        size: the size of the block, in bytes.
        bound: the most bytes in use at once, each span rounded up to the alignment: no block is smaller.
    """

    offsets: tuple[int, ...]
    size: int
    bound: int


def pack(spans: Sequence[Span], alignment: int = ALIGNMENT) -> Packing:
    """Offsets for spans, such that no two overlap both in time and in memory.

    Args:
        alignment: offsets are its multiples, in bytes.

    >>> from torchard.functional.core.spans import Span
    >>> from torchard.functional.memory.packing import pack
    >>> pack([Span(0, 1, 64), Span(1, 2, 128), Span(2, 3, 64)])
    Packing(offsets=(128, 0, 128), size=192, bound=192)
    """
    rounded = [span._replace(nbytes=-(-span.nbytes // alignment) * alignment) for span in spans]
    bound = max(bytes_at(rounded, max((span.end for span in rounded), default=0) + 1))
    rounded = [span._replace(nbytes=span.nbytes + _apart(span.nbytes)) for span in rounded]
    order = sorted(range(len(rounded)), key=lambda i: (-rounded[i].nbytes, i))
    large = [i for i in order if rounded[i].nbytes * _SMALL >= bound]
    found = _searched(rounded, large, bound)
    size, offsets = _placed(rounded, [*found, *order[len(large) :]])
    return Packing(tuple(offsets), size, bound)


def _apart(nbytes: int) -> int:
    """The bytes that are left after a buffer, so that the next one has other places in caches.

    Caches put addresses that are equal modulo a power of two in few places, and processors take a load
    for one of what was just stored there ("4K aliasing"; Intel 64 and IA-32 Architectures Optimization
    Reference Manual, B.5.4.4). Buffers of whole pages, one after another, would all be so.
    """
    return ALIGNMENT if nbytes >= _LARGE and nbytes % _PAGE == 0 else 0


def _is_close(size: int, bound: int) -> bool:
    return (size - bound) * _CLOSE <= bound


_ORDERS: Sequence[Callable[[Span], tuple[int, ...]]] = (
    lambda span: (-span.nbytes, span.begin - span.end),
    lambda span: (span.begin - span.end, -span.nbytes),
    lambda span: (span.nbytes * (span.begin - span.end - 1),),
    lambda span: (span.begin, -span.nbytes),
    lambda span: (-span.end, -span.nbytes),
)


def _searched(spans: Sequence[Span], some: Sequence[int], bound: int) -> list[int]:
    """The order of some spans that gives the smallest packing of those that were tried."""
    orders = [sorted(some, key=lambda i: (*key(spans[i]), i)) for key in _ORDERS]
    tried = [_Placed(*_placed(spans, order), order) for order in orders]
    best = min(tried, key=lambda each: each.size)
    rounds = min(_COMPARISONS // max(len(some) ** 2, 1) // _STARTS, _MOVES)
    for seed in range(_STARTS):
        if not _is_close(best.size, bound):
            again = _improved(spans, min(tried, key=lambda each: each.size), bound, rounds, Random(seed))
            best = min(best, again, key=lambda each: each.size)
    return best.order


class _Placed(NamedTuple):
    """The packing of an order."""

    size: int
    offsets: list[int]
    order: list[int]


def _improved(
    spans: Sequence[Span], now: _Placed, bound: int, rounds: int, rng: Random
) -> _Placed:
    """The packing after some moves of buffers at the top to earlier places."""
    for _ in range(rounds):
        order = now.order
        top = [at for at, i in enumerate(order) if now.offsets[i] + spans[i].nbytes == now.size]
        at = rng.choice(top) if top else 0
        if at == 0 or _is_close(now.size, bound):
            break
        moved = [*order[:at], *order[at + 1 :]]
        moved.insert(rng.randrange(at), order[at])
        other = _Placed(*_placed(spans, moved), moved)
        now = other if other.size <= now.size else now
    return now


def _placed(spans: Sequence[Span], order: Sequence[int]) -> tuple[int, list[int]]:
    """The size, and the offsets, if each span of an order takes the lowest gap that it fits into."""
    offsets = [0] * len(spans)
    # Of those that are placed, by offset: offset, end in memory, begin and end in time.
    placed: list[tuple[int, int, int, int]] = []
    size = 0
    for i in order:
        begin, end, nbytes = spans[i]
        low = 0
        for offset, top, other_begin, other_end in placed:
            if other_begin <= end and begin <= other_end:
                if offset - low >= nbytes:
                    break
                if top > low:
                    low = top
        offsets[i] = low
        size = max(size, low + nbytes)
        insort(placed, (low, low + nbytes, begin, end))
    return size, offsets
