"""Packings: no two buffers overlap, and the block is nearly as small as it can be."""

from __future__ import annotations

from itertools import permutations

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard.functional.core.spans import Span
from torchard.functional.memory.packing import Packing, pack

spans = st.lists(
    st.builds(
        lambda begin, length, size: Span(begin, begin + length, size),
        st.integers(0, 12),
        st.integers(0, 6),
        st.integers(0, 9),
    ),
    max_size=30,
)


def at_once(packed: list[Span]) -> int:
    """The most bytes in use at once."""
    times = {span.begin for span in packed}
    return max((sum(s.nbytes for s in packed if s.begin <= t <= s.end) for t in times), default=0)


def is_valid(packed: list[Span], packing: Packing) -> bool:
    ranges = [(s, o, o + s.nbytes) for s, o in zip(packed, packing.offsets, strict=True) if s.nbytes]
    apart = all(
        one.end < other.begin or other.end < one.begin or high <= start or end <= low
        for i, (one, low, high) in enumerate(ranges)
        for other, start, end in ranges[:i]
    )
    return apart and all(high <= packing.size for _, _, high in ranges)


@settings(max_examples=examples(ci=300, explore=20000))
@given(spans)
def test_no_overlap(drawn: list[Span]) -> None:
    packing = pack(drawn, alignment=1)
    assert is_valid(drawn, packing)
    assert packing.bound == at_once(drawn) <= packing.size
    assert packing.size <= 1.5 * packing.bound


@settings(max_examples=examples(ci=60, explore=2000))
@given(spans)
def test_alignment(drawn: list[Span]) -> None:
    packing = pack(drawn, alignment=4)
    assert is_valid(drawn, packing)
    assert all(offset % 4 == 0 for offset in packing.offsets)
    assert packing.bound == at_once([s._replace(nbytes=-(-s.nbytes // 4) * 4) for s in drawn])


def smallest(drawn: list[Span]) -> int:
    """The smallest block, by trying all orders: in that of the offsets, each is as low as it can be."""
    best = sum(span.nbytes for span in drawn)
    for order in permutations(drawn):
        tops: list[tuple[Span, int]] = []
        for span in order:
            under = (top for other, top in tops if other.begin <= span.end and span.begin <= other.end)
            tops.append((span, max(under, default=0) + span.nbytes))
        best = min(best, max((top for _, top in tops), default=0))
    return best


@settings(max_examples=examples(ci=60, explore=2000), deadline=None)
@given(spans.map(lambda drawn: drawn[:6]))
def test_few_are_packed_as_small_as_possible(drawn: list[Span]) -> None:
    assert pack(drawn, alignment=1).size <= 1.25 * smallest(drawn)


def test_what_ends_makes_place() -> None:
    """Two short buffers side by side, where a long one was placed below them."""
    drawn = [Span(0, 1, 2), Span(1, 2, 2), Span(2, 3, 2), Span(0, 0, 2), Span(3, 3, 2), Span(1, 1, 1)]
    assert pack(drawn, alignment=1).size == smallest(drawn) == 5
