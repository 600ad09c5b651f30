"""residual + dropout(x + b), forward and backward; the backward recomputes the mask.

Source: Srivastava et al. 2014 (JMLR 15).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.launch import (
    accumulator,
    cdiv,
    launch,
    partials,
    programs,
    rows_of,
    tile,
    tile_here,
    tiles,
    total,
)
from torchard.kernels.triton.stream import Stream, behind_dropout, dropout, stream

__all__ = ["bias_dropout_residual", "bias_dropout_residual_backward"]


@triton.jit
def _forward(
    source,
    out,
    n,
    d,
    DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, cols, inside = tile_here(n, d, ROWS, BLOCK)
    first = tl.program_id(0) % tl.cdiv(d, BLOCK) * BLOCK
    value = stream(source, rows, first, DROPOUT, ACC, ROWS, BLOCK)
    tl.store(out + rows * d + cols, value, mask=inside)


@triton.jit
def _backward(
    key,
    cotangent,
    dx,
    db,
    n,
    d,
    stride,
    DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(1) * BLOCK
    cols = first + tl.arange(0, BLOCK)
    summed = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (rows < n) & (cols < d)[None, :]
        ct = tl.load(cotangent + rows * stride + cols[None, :], mask=inside, other=0).to(ACC)
        grad = behind_dropout(ct, key, rows, first, d, DROPOUT, ROWS, BLOCK)
        tl.store(dx + rows * d + cols[None, :], grad, mask=inside)
        summed += grad
    tl.store(db + tl.program_id(0).to(tl.int64) * d + cols, tl.sum(summed, 0), mask=cols < d)


def bias_dropout_residual(
    x: Tensor, b: Tensor, residual: Tensor, key: Tensor, threshold: float
) -> Tensor:
    """residual + dropout(x + b), for x, residual [..., d], b [d], key [2]; moves 3 n d elements."""
    value = Stream(x, residual, b, key, threshold)
    out = x.new_empty(x.shape, dtype=value.dtype)
    rows = rows_of(x)
    shape = tile(rows)
    launch(
        _forward,
        tiles(rows, shape),
        *(value.source, out, *rows.shape),
        on=x,
        **value.constants,
        **shape.constants,
    )
    return out


def bias_dropout_residual_backward(
    key: Tensor, cotangent: Tensor, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, b and residual, for key [2], cotangent [..., d]; moves 2 n d elements."""
    rows, acc = rows_of(cotangent), accumulator(cotangent)
    n, d = rows.shape
    shape = tile(rows)
    columns = cdiv(d, shape.block)
    count, options = programs(rows, shape, columns)
    dx, db = cotangent.new_empty(cotangent.shape), partials(count, rows, acc)
    launch(
        _backward,
        (count, columns),
        *(key.contiguous(), rows, dx, db, n, d, rows.stride(0)),
        on=cotangent,
        ACC=acc,
        DROPOUT=dropout(threshold, d),
        **shape.constants,
        **options,
    )
    return dx, total(db, cotangent.dtype), cotangent
