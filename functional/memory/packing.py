"""Packing: offsets for buffers with known lifetimes, in a block that is as small as possible.

This is dynamic storage allocation, which is NP-hard (Garey and Johnson 1979, SR2). No packing is smaller
than the most bytes in use at once, so the ratio of the two bounds what is lost.

Buffers are placed one after another, each in the lowest gap that it fits into. What decides is the order:
those by size, by duration and by area are tried (Pisarchyk and Lee 2020, arXiv:2001.03288). If a packing
is not close to the bound, the buffers at its top are moved forward in its order, and it is placed again:
a buffer that makes trouble is placed earlier ("squeaky wheel" optimization, Joslin and Clements 1999). An
exact search as in MiniMalloc (Moffitt and others, ASPLOS 2024, doi:10.1145/3623278.3624752) would gain
less than a thousandth for the programs of benchmarks/planned_memory.py.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ALIGNMENT", "Packing", "Span", "pack"]

ALIGNMENT = 64
"""Bytes: a cache line, and what vector instructions load at once."""
# A packing is good enough if it is larger than the bound by less than one part in so many.
_CLOSE = 1000
# How often an order is improved, and how many comparisons of buffers that may take.
_ROUNDS, _COMPARISONS = 24, 20_000_000


class Span(NamedTuple):
    """The bytes that are in use from one time to another, both included."""

    begin: int
    end: int
    nbytes: int


@dataclass(frozen=True)
class Packing:
    """Where each of some spans begins.

    Attributes:
        offsets: in bytes, by span.
        size: of the block, in bytes.
        bound: the most bytes in use at once, each span rounded up to the alignment: no block is smaller.
    """

    offsets: tuple[int, ...]
    size: int
    bound: int


def pack(spans: Sequence[Span], alignment: int = ALIGNMENT) -> Packing:
    """Offsets for spans, such that no two overlap both in time and in memory.

    Args:
        alignment: offsets are its multiples, in bytes.

    >>> from torchard.functional.memory.packing import Span, pack
    >>> pack([Span(0, 1, 64), Span(1, 2, 128), Span(2, 3, 64)])
    Packing(offsets=(128, 0, 128), size=192, bound=192)
    """
    rounded = [span._replace(nbytes=-(-span.nbytes // alignment) * alignment) for span in spans]
    bound = _most_at_once(rounded)
    best: tuple[int, list[int]] | None = None
    for key in _ORDERS:
        order = sorted(range(len(rounded)), key=lambda i: (*key(rounded[i]), i))
        best = _better(best, _improved(rounded, order, bound))
        if _is_close(best[0], bound):
            break
    assert best is not None
    return Packing(tuple(best[1]), best[0], bound)


def _is_close(size: int, bound: int) -> bool:
    return (size - bound) * _CLOSE <= bound


_ORDERS: Sequence[Callable[[Span], tuple[int, ...]]] = (
    lambda span: (-span.nbytes, span.begin - span.end),
    lambda span: (span.begin - span.end, -span.nbytes),
    lambda span: (span.nbytes * (span.begin - span.end - 1),),
)


def _better(
    best: tuple[int, list[int]] | None, other: tuple[int, list[int]]
) -> tuple[int, list[int]]:
    return other if best is None or other[0] < best[0] else best


def _most_at_once(spans: Sequence[Span]) -> int:
    changes = sorted(
        change for s in spans for change in ((s.begin, 1, s.nbytes), (s.end, 2, -s.nbytes))
    )
    most = now = 0
    for _, _, delta in changes:
        now += delta
        most = max(most, now)
    return most


def _improved(spans: Sequence[Span], order: list[int], bound: int) -> tuple[int, list[int]]:
    """The best of the packings of an order, and of those in which what is at the top comes earlier."""
    best = _placed(spans, order)
    for _ in range(min(_ROUNDS, _COMPARISONS // max(len(order) ** 2, 1))):
        if _is_close(best[0], bound):
            break
        size, offsets = _placed(spans, order)
        best = _better(best, (size, offsets))
        at = {i: position for position, i in enumerate(order)}
        top = [i for i in order if offsets[i] + spans[i].nbytes == size]
        if at[top[0]] == 0:
            break
        for i in top:
            order.remove(i)
            order.insert(at[i] // 2, i)
    return best


def _placed(spans: Sequence[Span], order: Sequence[int]) -> tuple[int, list[int]]:
    """The size, and the offsets, if each span in turn takes the lowest gap that it fits into."""
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
