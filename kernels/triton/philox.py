"""The words of `torchard.random.bits`, drawn where they are used: nothing of a mask's size is stored.

As `torchard.functional.philox`: word i of a key is a half, low first, of one of the four results of
Philox4x64-10 for the counter (i // 8, 0, 0, 0).
"""

import triton
import triton.language as tl

__all__ = ["dropped"]

WORDS = tl.constexpr(8)


@triton.jit
def _philox(counter, k0, k1):
    """Four uint64 for each counter (counter, 0, 0, 0)."""
    c0 = counter.to(tl.uint64)
    c1 = tl.zeros_like(c0)
    c2 = c1
    c3 = c1
    for _ in tl.static_range(10):
        h0 = tl.umulhi(c0, 0xD2E7470EE14C6C93)
        l0 = c0 * 0xD2E7470EE14C6C93
        h1 = tl.umulhi(c2, 0xCA5A826395121157)
        l1 = c2 * 0xCA5A826395121157
        c0 = h1 ^ c1 ^ k0
        c1 = l1
        c2 = h0 ^ c3 ^ k1
        c3 = l0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@triton.jit
def _both_halves(lane):
    """Low and high half, uint32."""
    return lane.to(tl.uint32), (lane >> 32).to(tl.uint32)


@triton.jit
def _side_by_side(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """All eight words of counters [ROWS, BLOCK / 8], in order, [ROWS, BLOCK]."""
    low0, high0 = _both_halves(x[0])
    low1, high1 = _both_halves(x[1])
    low2, high2 = _both_halves(x[2])
    low3, high3 = _both_halves(x[3])
    # Each join adds a last dim of two: which pair of lanes, which lane of it, which half.
    low = tl.join(tl.join(low0, low2), tl.join(low1, low3))
    high = tl.join(tl.join(high0, high2), tl.join(high1, high3))
    return tl.reshape(tl.join(low, high), [ROWS, BLOCK])


@triton.jit
def dropped(
    key,
    rows,
    first,
    d,
    THRESHOLD: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whether words are below a threshold, [ROWS, BLOCK]; of rows [ROWS, 1], columns from the first on.

    Where rows are whole counters long (ALIGNED), all words of each are used; else every element
    computes a counter's words for one of them.
    """
    k0 = tl.load(key).to(tl.uint64, bitcast=True)
    k1 = tl.load(key + 1).to(tl.uint64, bitcast=True)
    if ALIGNED:
        counters = (rows * d + first) // WORDS + tl.arange(0, BLOCK // WORDS)[None, :]
        words = _side_by_side(_philox(counters, k0, k1), ROWS, BLOCK)
    else:
        index = rows * d + first + tl.arange(0, BLOCK)[None, :]
        c0, c1, c2, c3 = _philox(index // WORDS, k0, k1)
        turn = index % WORDS // 2
        lane = tl.where(turn < 2, tl.where(turn == 0, c0, c1), tl.where(turn == 2, c2, c3))
        low, high = _both_halves(lane)
        words = tl.where(index % 2 == 0, low, high)
    return words < THRESHOLD
