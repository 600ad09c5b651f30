"""The norms' backward: statistics are computed again from the rows, which are read anyway."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.launch import (
    LIMITS,
    launch,
    partials,
    programs,
    rows_of,
    total,
    whole,
)
from torchard.kernels.triton.norms import mean_of_long, standardised
from torchard.kernels.triton.stream import Stream, behind_dropout, dropout, stream

__all__ = [
    "add_layer_norm_backward",
    "add_rms_norm_backward",
    "bias_dropout_residual_layer_norm_backward",
    "layer_norm_backward",
    "rms_norm_backward",
]


@triton.jit
def _whole_rows(
    source,
    key,
    w,
    kept,
    cotangent,
    kept_stride,
    cotangent_stride,
    dh,
    dx,
    dbias,
    dw,
    db,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program goes on over rows, and sums what the weights get of them.

    kept: the cotangent of the stream's value; dh: its gradient; dx, dbias: behind dropout, with a key.
    """
    n, d = source[0], source[1]
    cols = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(w + cols, mask=cols < d, other=0).to(ACC)
    to_w = tl.zeros([ROWS, BLOCK], ACC)
    to_b = tl.zeros([ROWS, BLOCK], ACC)
    to_bias = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (rows < n) & (cols < d)
        value = stream(source, rows, 0, DROPOUT, ACC, ROWS, BLOCK)
        centred, rstd = standardised(value, inside, d, EPS, CENTRED)
        normed = tl.where(inside, centred * rstd, 0.0)
        moved = tl.load(cotangent + rows * cotangent_stride + cols, mask=inside, other=0).to(ACC)
        to_w += moved * normed
        to_b += moved
        moved *= weight
        change = moved - normed * (tl.sum(moved * normed, 1) / d)[:, None]
        if CENTRED:
            change -= (tl.sum(moved, 1) / d)[:, None]
        change *= rstd
        if kept is not None:
            change += tl.load(kept + rows * kept_stride + cols, mask=inside, other=0).to(ACC)
        tl.store(dh + rows * d + cols, change, mask=inside)
        if key is not None:
            change = behind_dropout(change, key, rows, 0, d, DROPOUT, ROWS, BLOCK)
            tl.store(dx + rows * d + cols, change, mask=inside)
            to_bias += tl.where(inside, change, 0.0)
    mine = tl.program_id(0).to(tl.int64) * d + tl.arange(0, BLOCK)
    known = tl.arange(0, BLOCK) < d
    tl.store(dw + mine, tl.sum(to_w, 0), mask=known)
    if CENTRED:
        tl.store(db + mine, tl.sum(to_b, 0), mask=known)
    if key is not None:
        tl.store(dbias + mine, tl.sum(to_bias, 0), mask=known)


@triton.jit
def _add(sums, value, cols, d):
    """Onto the sums [d] of this program, in memory."""
    at = sums + tl.program_id(0).to(tl.int64) * d + cols
    tl.store(at, tl.load(at, mask=cols < d, other=0) + value, mask=cols < d)


@triton.jit
def _long_rows(
    source,
    key,
    w,
    kept,
    cotangent,
    kept_stride,
    cotangent_stride,
    dh,
    dx,
    dbias,
    dw,
    db,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same, row by row in blocks; the sums, which start at 0, are in memory."""
    tl.static_assert(ROWS == 1)
    n, d = source[0], source[1]
    for start in range(tl.program_id(0), n, tl.num_programs(0)):
        rows = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        mean = mean_of_long(source, rows, CENTRED, DROPOUT, ACC, ROWS, BLOCK)
        squares = tl.zeros([ROWS, BLOCK], ACC)
        products = tl.zeros([ROWS, BLOCK], ACC)
        summed = tl.zeros([ROWS, BLOCK], ACC)
        for first in range(0, d, BLOCK):
            cols = first + tl.arange(0, BLOCK)[None, :]
            value = stream(source, rows, first, DROPOUT, ACC, ROWS, BLOCK)
            centred = tl.where(cols < d, value - mean, 0.0)
            moved = tl.load(cotangent + rows * cotangent_stride + cols, mask=cols < d, other=0)
            moved = moved.to(ACC) * tl.load(w + cols, mask=cols < d, other=0).to(ACC)
            squares += centred * centred
            products += moved * centred
            summed += moved
        rstd = tl.rsqrt(tl.sum(squares, 1) / d + EPS)[:, None]
        slope = (tl.sum(products, 1) / d)[:, None] * rstd
        for first in range(0, d, BLOCK):
            cols = first + tl.arange(0, BLOCK)[None, :]
            value = stream(source, rows, first, DROPOUT, ACC, ROWS, BLOCK)
            normed = (value - mean) * rstd
            moved = tl.load(cotangent + rows * cotangent_stride + cols, mask=cols < d, other=0)
            moved = moved.to(ACC)
            _add(dw, moved * normed, cols, d)
            if CENTRED:
                _add(db, moved, cols, d)
            moved *= tl.load(w + cols, mask=cols < d, other=0).to(ACC)
            change = moved - normed * slope
            if CENTRED:
                change -= (tl.sum(summed, 1) / d)[:, None]
            change *= rstd
            if kept is not None:
                change += tl.load(kept + rows * kept_stride + cols, mask=cols < d, other=0).to(ACC)
            tl.store(dh + rows * d + cols, change, mask=cols < d)
            if key is not None:
                change = behind_dropout(change, key, rows, first, d, DROPOUT, ROWS, BLOCK)
                tl.store(dx + rows * d + cols, change, mask=cols < d)
                _add(dbias, change, cols, d)
        tl.debug_barrier()  # before other threads add to what these have added to


@dataclass(frozen=True)
class _Gradients:
    """Of the stream's value h and x [..., d]; sums for bias, w and b [programs, d].

    x and the bias have some of their own behind dropout, b has one if the rows are centred.
    """

    h: Tensor
    x: Tensor
    bias: Tensor
    w: Tensor
    b: Tensor


def _gradients(
    h: Tensor,
    w: Tensor,
    kept: Tensor | None,
    cotangent: Tensor,
    eps: float,
    centred: bool,
    key: Tensor | None = None,
    threshold: float = 0,
) -> _Gradients:
    """kept, cotangent: of h, if it is a result, and of its norm, [..., d]; key: of a dropout behind h."""
    value = Stream(h)
    n, d = value.shape
    moved, more = rows_of(cotangent), None if kept is None else rows_of(kept)
    shape, long, dropping = whole(n, d), d > LIMITS.whole, key is not None
    # The generator needs many registers while the rows have theirs.
    parts, options = programs(moved, shape, registers=128 if dropping else 64)
    acc = value.constants["ACC"]

    def sums(needed: bool = True) -> Tensor:
        made = partials(parts if needed else 0, moved, acc)
        return made.zero_() if long else made

    h = value.x.new_empty(value.x.shape, dtype=value.dtype)
    x = value.x.new_empty(value.x.shape) if dropping else h
    found = _Gradients(h, x, sums(dropping), sums(), sums(centred))
    launch(
        _long_rows if long else _whole_rows,
        (parts if d else 0,),
        *(value.source, None if key is None else key.contiguous()),
        *(w.contiguous(), more, moved, 0 if more is None else more.stride(0), moved.stride(0)),
        *(h, x, found.bias, found.w, found.b),
        on=h,
        EPS=eps,
        CENTRED=centred,
        **{**value.constants, "DROPOUT": dropout(threshold, d)},
        **shape.constants,
        **options,
    )
    return found


def layer_norm_backward(
    x: Tensor, w: Tensor, cotangent: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x, cotangent [..., d], w [d] -> of x, w, b; 3 n d elements are moved."""
    found = _gradients(x, w, None, cotangent, eps, True)
    return found.h, total(found.w, w.dtype), total(found.b, cotangent.dtype)


def rms_norm_backward(x: Tensor, w: Tensor, cotangent: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, cotangent [..., d], w [d] -> of x, w; 3 n d elements are moved."""
    found = _gradients(x, w, None, cotangent, eps, False)
    return found.h, total(found.w, w.dtype)


def add_layer_norm_backward(
    w: Tensor, h: Tensor, kept: Tensor, cotangent: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """w [d], h = x + y and cotangents [..., d] -> of x and y alike, w, b; 4 n d elements are moved."""
    found = _gradients(h, w, kept, cotangent, eps, True)
    return found.h, total(found.w, w.dtype), total(found.b, kept.dtype)


def add_rms_norm_backward(
    w: Tensor, h: Tensor, kept: Tensor, cotangent: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """w [d], h = x + y and cotangents [..., d] -> of x and y alike, w; 4 n d elements are moved."""
    found = _gradients(h, w, kept, cotangent, eps, False)
    return found.h, total(found.w, w.dtype)


def bias_dropout_residual_layer_norm_backward(
    key: Tensor,
    weight: Tensor,
    h: Tensor,
    kept: Tensor,
    cotangent: Tensor,
    threshold: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """key [2], weight [d], the stream h and cotangents [..., d] -> of x, b, residual, weight, bias.

    5 n d elements are moved.
    """
    found = _gradients(h, weight, kept, cotangent, eps, True, key, threshold)
    assert found.x is not None and found.bias is not None
    to_b, to_weight = total(found.bias, kept.dtype), total(found.w, weight.dtype)
    return found.x, to_b, found.h, to_weight, total(found.b, kept.dtype)
