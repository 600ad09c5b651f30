"""The words of `torchard.random.bits`, computed where they are used, so that no mask is stored.

As in `torchard.functional.philox`, word i of a key is a half, low first, of one of the four results of
Philox4x64-10 for the counter (i // 8, 0, 0, 0).
"""

import triton
import triton.language as tl

__all__ = ["dropped"]

WORDS = tl.constexpr(8)


@triton.jit
def _philox(counter, k0, k1):
    """The four uint64 of each counter (counter, 0, 0, 0)."""
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
    """The low and the high half of a uint64, as uint32."""
    return lane.to(tl.uint32), (lane >> 32).to(tl.uint32)


@triton.jit
def _side_by_side(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The eight words of each counter [ROWS, BLOCK / 8], in order, as [ROWS, BLOCK]."""
    low0, high0 = _both_halves(x[0])
    low1, high1 = _both_halves(x[1])
    low2, high2 = _both_halves(x[2])
    low3, high3 = _both_halves(x[3])
    # Each join adds a last dim of size 2: the pair of lanes, the lane in the pair, the half of the lane.
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
    """Whether the words in rows [ROWS, 1] and columns from ``first`` on are below a threshold.

    If the length of rows is a multiple of 8 (ALIGNED), all words of a counter are used. Otherwise each
    element computes the words of its counter, and uses one.
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
