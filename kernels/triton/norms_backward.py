"""The norms' backward, which recomputes statistics from the rows, since it reads those anyway."""

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
]


@triton.jit
def _whole_rows(
    source,
    key,
    w,
    h_ct,
    cotangent,
    h_ct_stride,
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
    """Store the gradients of h and, with a key, of dropout's argument; sum those of the weights.

    Every program loops over rows, and has its own sums.

    Args:
        h_ct: the cotangent of h, the value of the stream, if h is a result.
        dx, dbias: for the gradients of x and bias in h = residual + dropout(x + bias).
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
        ct = tl.load(cotangent + rows * cotangent_stride + cols, mask=inside, other=0).to(ACC)
        to_w += ct * normed
        to_b += ct
        ct *= weight
        grad = ct - normed * (tl.sum(ct * normed, 1) / d)[:, None]
        if CENTRED:
            grad -= (tl.sum(ct, 1) / d)[:, None]
        grad *= rstd
        if h_ct is not None:
            grad += tl.load(h_ct + rows * h_ct_stride + cols, mask=inside, other=0).to(ACC)
        tl.store(dh + rows * d + cols, grad, mask=inside)
        if key is not None:
            grad = behind_dropout(grad, key, rows, 0, d, DROPOUT, ROWS, BLOCK)
            tl.store(dx + rows * d + cols, grad, mask=inside)
            to_bias += tl.where(inside, grad, 0.0)
    mine = tl.program_id(0).to(tl.int64) * d + tl.arange(0, BLOCK)
    known = tl.arange(0, BLOCK) < d
    tl.store(dw + mine, tl.sum(to_w, 0), mask=known)
    if CENTRED:
        tl.store(db + mine, tl.sum(to_b, 0), mask=known)
    if key is not None:
        tl.store(dbias + mine, tl.sum(to_bias, 0), mask=known)


@triton.jit
def _add(sums, value, cols, d):
    """Add a value to this program's sums [d], in memory."""
    at = sums + tl.program_id(0).to(tl.int64) * d + cols
    tl.store(at, tl.load(at, mask=cols < d, other=0) + value, mask=cols < d)


@triton.jit
def _long_rows(
    source,
    key,
    w,
    h_ct,
    cotangent,
    h_ct_stride,
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
    """As `_whole_rows`, row by row in blocks; the sums, which start at 0, are in memory."""
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
            ct = tl.load(cotangent + rows * cotangent_stride + cols, mask=cols < d, other=0)
            ct = ct.to(ACC) * tl.load(w + cols, mask=cols < d, other=0).to(ACC)
            squares += centred * centred
            products += ct * centred
            summed += ct
        rstd = tl.rsqrt(tl.sum(squares, 1) / d + EPS)[:, None]
        slope = (tl.sum(products, 1) / d)[:, None] * rstd
        for first in range(0, d, BLOCK):
            cols = first + tl.arange(0, BLOCK)[None, :]
            value = stream(source, rows, first, DROPOUT, ACC, ROWS, BLOCK)
            normed = (value - mean) * rstd
            ct = tl.load(cotangent + rows * cotangent_stride + cols, mask=cols < d, other=0)
            ct = ct.to(ACC)
            _add(dw, ct * normed, cols, d)
            if CENTRED:
                _add(db, ct, cols, d)
            ct *= tl.load(w + cols, mask=cols < d, other=0).to(ACC)
            grad = ct - normed * slope
            if CENTRED:
                grad -= (tl.sum(summed, 1) / d)[:, None]
            grad *= rstd
            if h_ct is not None:
                grad += tl.load(h_ct + rows * h_ct_stride + cols, mask=cols < d, other=0).to(ACC)
            tl.store(dh + rows * d + cols, grad, mask=cols < d)
            if key is not None:
                grad = behind_dropout(grad, key, rows, first, d, DROPOUT, ROWS, BLOCK)
                tl.store(dx + rows * d + cols, grad, mask=cols < d)
                _add(dbias, grad, cols, d)
        tl.debug_barrier()  # before other threads add to the same sums


@dataclass(frozen=True)
class _Gradients:
    """The gradients of h and x [..., d]; partial sums, [programs, d], of those of bias, w and b.

    Without dropout x is h, and bias has no rows. b has none unless the norm is centred.
    """

    h: Tensor
    x: Tensor
    bias: Tensor
    w: Tensor
    b: Tensor


def _gradients(
    h: Tensor,
    w: Tensor,
    h_cotangent: Tensor | None,
    cotangent: Tensor,
    eps: float,
    centred: bool,
    key: Tensor | None = None,
    threshold: float = 0,
) -> _Gradients:
    """The gradients of the norm of h.

    Args:
        h_cotangent, cotangent: of h, if it is a result, and of its norm, [..., d].
        key, threshold: of the dropout in h = residual + dropout(x + bias), if there is one.
    """
    value = Stream(h)
    n, d = value.shape
    ct, h_ct = rows_of(cotangent), None if h_cotangent is None else rows_of(h_cotangent)
    shape, long, dropping = whole(n, d), d > LIMITS.whole, key is not None
    # The random generator needs many registers, besides those that hold rows.
    count, options = programs(ct, shape, registers=128 if dropping else 64)
    acc = value.constants["ACC"]

    def sums(needed: bool = True) -> Tensor:
        buffer = partials(count if needed else 0, ct, acc)
        return buffer.zero_() if long else buffer

    h = value.x.new_empty(value.x.shape, dtype=value.dtype)
    x = value.x.new_empty(value.x.shape) if dropping else h
    gradients = _Gradients(h, x, sums(dropping), sums(), sums(centred))
    launch(
        _long_rows if long else _whole_rows,
        (count if d else 0,),
        *(value.source, None if key is None else key.contiguous()),
        *(w.contiguous(), h_ct, ct, 0 if h_ct is None else h_ct.stride(0), ct.stride(0)),
        *(h, x, gradients.bias, gradients.w, gradients.b),
        on=h,
        EPS=eps,
        CENTRED=centred,
        **{**value.constants, "DROPOUT": dropout(threshold, d)},
        **shape.constants,
        **options,
    )
    return gradients


def layer_norm_backward(
    x: Tensor, w: Tensor, cotangent: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, w, b, for x, cotangent [..., d], w [d]; moves 3 n d elements."""
    gradients = _gradients(x, w, None, cotangent, eps, True)
    return gradients.h, total(gradients.w, w.dtype), total(gradients.b, cotangent.dtype)


def add_layer_norm_backward(
    w: Tensor, h: Tensor, h_cotangent: Tensor, cotangent: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (equal to that of y), w, b, for h = x + y; moves 4 n d elements."""
    gradients = _gradients(h, w, h_cotangent, cotangent, eps, True)
    return gradients.h, total(gradients.w, w.dtype), total(gradients.b, h_cotangent.dtype)


def add_rms_norm_backward(
    w: Tensor, h: Tensor, h_cotangent: Tensor, cotangent: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The gradients of x (equal to that of y), w, for h = x + y; moves 4 n d elements."""
    gradients = _gradients(h, w, h_cotangent, cotangent, eps, False)
    return gradients.h, total(gradients.w, w.dtype)


def bias_dropout_residual_layer_norm_backward(
    key: Tensor,
    weight: Tensor,
    h: Tensor,
    h_cotangent: Tensor,
    cotangent: Tensor,
    threshold: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """The gradients of x, b, residual, weight, bias, for h = residual + dropout(x + b); moves 5 n d."""
    gradients = _gradients(h, weight, h_cotangent, cotangent, eps, True, key, threshold)
    assert gradients.x is not None and gradients.bias is not None
    to_b, to_weight = total(gradients.bias, h_cotangent.dtype), total(gradients.w, weight.dtype)
    return gradients.x, to_b, gradients.h, to_weight, total(gradients.b, h_cotangent.dtype)
