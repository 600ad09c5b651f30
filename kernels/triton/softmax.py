"""Softmax over the last dim, forward and backward.

Source: Milakov and Gimelshein 2018 (arXiv:1805.02867) for rows that are read in blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.arithmetic import exp
from torchard.kernels.triton.launch import LIMITS, accumulator, cdiv, launch, rows_of, whole

__all__ = ["exponentials", "softmax", "softmax_backward"]


@triton.jit
def _subtracted(largest):
    """The number to subtract from a row: its maximum, or 0 for -inf, since -inf - -inf is NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def exponentials(
    x,
    rows,
    n,
    d,
    x_stride,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The number to subtract from each row [ROWS, 1] of x, and the sum of exp, in one pass; both [ROWS].

    The sum so far is scaled down whenever the maximum grows.
    """
    largest = tl.full([ROWS], float("-inf"), ACC)
    summed = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(0, d, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        inside = (rows < n) & (cols < d)
        value = tl.load(x + rows * x_stride + cols, mask=inside, other=float("-inf")).to(ACC)
        running = tl.maximum(largest, tl.max(value, 1))
        base = _subtracted(running)
        shrink = exp(largest - base)[:, None]
        e = exp(value - base[:, None])
        summed = summed * shrink + e
        largest = running
    return _subtracted(largest), tl.sum(summed, 1)


@triton.jit
def _forward(
    x,
    out,
    n,
    d,
    x_stride,
    WHOLE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    if WHOLE:
        cols = tl.arange(0, BLOCK)[None, :]
        inside = (rows < n) & (cols < d)
        value = tl.load(x + rows * x_stride + cols, mask=inside, other=float("-inf")).to(ACC)
        e = exp(value - _subtracted(tl.max(value, 1))[:, None])
        tl.store(out + rows * d + cols, e / tl.sum(e, 1)[:, None], mask=inside)
    else:
        base, summed = exponentials(x, rows, n, d, x_stride, ACC, ROWS, BLOCK)
        for start in range(0, d, BLOCK):
            cols = start + tl.arange(0, BLOCK)[None, :]
            inside = (rows < n) & (cols < d)
            value = tl.load(x + rows * x_stride + cols, mask=inside, other=0).to(ACC)
            e = exp(value - base[:, None])
            tl.store(out + rows * d + cols, e / summed[:, None], mask=inside)


@triton.jit
def _backward(
    result,
    cotangent,
    dx,
    n,
    d,
    result_stride,
    cotangent_stride,
    WHOLE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store s (c - sum(s c)), for s = softmax(x) and the cotangent c."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    if WHOLE:
        cols = tl.arange(0, BLOCK)[None, :]
        inside = (rows < n) & (cols < d)
        s = tl.load(result + rows * result_stride + cols, mask=inside, other=0).to(ACC)
        ct = tl.load(cotangent + rows * cotangent_stride + cols, mask=inside, other=0).to(ACC)
        grad = s * (ct - tl.sum(s * ct, 1)[:, None])
        tl.store(dx + rows * d + cols, grad, mask=inside)
    else:
        products = tl.zeros([ROWS, BLOCK], ACC)
        for start in range(0, d, BLOCK):
            cols = start + tl.arange(0, BLOCK)[None, :]
            inside = (rows < n) & (cols < d)
            s = tl.load(result + rows * result_stride + cols, mask=inside, other=0).to(ACC)
            ct = tl.load(cotangent + rows * cotangent_stride + cols, mask=inside, other=0)
            products += s * ct.to(ACC)
        mean = tl.sum(products, 1)[:, None]
        for start in range(0, d, BLOCK):
            cols = start + tl.arange(0, BLOCK)[None, :]
            inside = (rows < n) & (cols < d)
            s = tl.load(result + rows * result_stride + cols, mask=inside, other=0).to(ACC)
            ct = tl.load(cotangent + rows * cotangent_stride + cols, mask=inside, other=0)
            tl.store(dx + rows * d + cols, s * (ct.to(ACC) - mean), mask=inside)


def softmax(x: Tensor) -> Tensor:
    """The softmax of x [..., d] over d; moves 2 n d elements."""
    rows, out = rows_of(x), x.new_empty(x.shape)
    n, d = rows.shape
    shape = whole(n, d)
    launch(
        _forward,
        (cdiv(n, shape.rows) if d else 0,),
        *(rows, out, n, d, rows.stride(0)),
        on=x,
        WHOLE=d <= LIMITS.whole,
        ACC=accumulator(x),
        **shape.constants,
    )
    return out


def softmax_backward(result: Tensor, cotangent: Tensor) -> Tensor:
    """The gradient of x, for the softmax and a cotangent [..., d]; moves 3 n d elements."""
    rows, ct, dx = rows_of(result), rows_of(cotangent), result.new_empty(result.shape)
    n, d = rows.shape
    shape = whole(n, d)
    launch(
        _backward,
        (cdiv(n, shape.rows) if d else 0,),
        *(rows, ct, dx, n, d, rows.stride(0), ct.stride(0)),
        on=result,
        WHOLE=d <= LIMITS.whole,
        ACC=accumulator(result, cotangent),
        **shape.constants,
    )
    return dx
