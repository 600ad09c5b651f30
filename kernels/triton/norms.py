"""LayerNorm and RMSNorm of the value of a residual stream, forward.

Rows are held as a whole. Rows that are too long for that are read in blocks, once for every sum and
once for the result, mostly from the cache.

Source: Ba et al. 2016 (arXiv:1607.06450); Zhang and Sennrich 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.launch import LIMITS, cdiv, launch, whole
from torchard.kernels.triton.stream import Stream, stream

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "bias_dropout_residual_layer_norm",
    "layer_norm",
    "mean_of_long",
    "standardised",
]


@triton.jit
def standardised(value, inside, d, EPS: tl.constexpr, CENTRED: tl.constexpr):
    """Whole rows [ROWS, BLOCK], less their mean if CENTRED, and 1 / their root mean square, [ROWS, 1]."""
    if CENTRED:
        value = value - (tl.sum(value, 1) / d)[:, None]
    value = tl.where(inside, value, 0.0)
    return value, tl.rsqrt(tl.sum(value * value, 1) / d + EPS)[:, None]


@triton.jit
def mean_of_long(
    source,
    rows,
    CENTRED: tl.constexpr,
    DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The mean of each long row [ROWS, 1]; 0 if not CENTRED."""
    d = source[1]
    summed = tl.zeros([ROWS, BLOCK], ACC)
    if CENTRED:
        for first in range(0, d, BLOCK):
            summed += stream(source, rows, first, DROPOUT, ACC, ROWS, BLOCK)
    return (tl.sum(summed, 1) / d)[:, None]


@triton.jit
def _forward(
    source,
    w,
    b,
    h,
    out,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    WHOLE: tl.constexpr,
    DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the norm of the stream's value, and the value itself in h if that is given."""
    n, d = source[0], source[1]
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    if WHOLE:
        cols = tl.arange(0, BLOCK)[None, :]
        inside = (rows < n) & (cols < d)
        value = stream(source, rows, 0, DROPOUT, ACC, ROWS, BLOCK)
        if h is not None:
            tl.store(h + rows * d + cols, value, mask=inside)
        centred, rstd = standardised(value, inside, d, EPS, CENTRED)
        _store(centred * rstd, w, b, out, rows, cols, inside, d, ACC)
    else:
        mean = mean_of_long(source, rows, CENTRED, DROPOUT, ACC, ROWS, BLOCK)
        squares = tl.zeros([ROWS, BLOCK], ACC)
        for first in range(0, d, BLOCK):
            cols = first + tl.arange(0, BLOCK)[None, :]
            value = stream(source, rows, first, DROPOUT, ACC, ROWS, BLOCK)
            centred = tl.where(cols < d, value - mean, 0.0)
            squares += centred * centred
        rstd = tl.rsqrt(tl.sum(squares, 1) / d + EPS)[:, None]
        for first in range(0, d, BLOCK):
            cols = first + tl.arange(0, BLOCK)[None, :]
            inside = (rows < n) & (cols < d)
            value = stream(source, rows, first, DROPOUT, ACC, ROWS, BLOCK)
            if h is not None:
                tl.store(h + rows * d + cols, value, mask=inside)
            _store((value - mean) * rstd, w, b, out, rows, cols, inside, d, ACC)


@triton.jit
def _store(value, w, b, out, rows, cols, inside, d, ACC: tl.constexpr):
    """Store value * w + b."""
    value *= tl.load(w + cols, mask=cols < d, other=0).to(ACC)
    if b is not None:
        value += tl.load(b + cols, mask=cols < d, other=0).to(ACC)
    tl.store(out + rows * d + cols, value, mask=inside)


def _norm(
    value: Stream, w: Tensor, b: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor | None, Tensor]:
    """The stream's value, or None if it is x itself, and its norm, both [..., d]."""
    n, d = value.shape
    out = value.x.new_empty(value.x.shape, dtype=value.dtype)
    h = None if value.y is None else out.new_empty(out.shape)
    shape = whole(n, d)
    launch(
        _forward,
        (cdiv(n, shape.rows) if d else 0,),
        value.source,
        *(w.contiguous(), None if b is None else b.contiguous(), h, out),
        on=out,
        EPS=eps,
        CENTRED=centred,
        WHOLE=d <= LIMITS.whole,
        **value.constants,
        **shape.constants,
    )
    return h, out


def layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """LayerNorm of x [..., d] with w, b [d]; moves 2 n d elements."""
    return _norm(Stream(x), w, b, eps, True)[1]


def add_layer_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor, eps: float) -> Any:
    """x + y, for x, y [..., d], and its LayerNorm with w, b [d]; moves 4 n d elements."""
    return _norm(Stream(x, y), w, b, eps, True)


def add_rms_norm(x: Tensor, y: Tensor, w: Tensor, eps: float) -> Any:
    """x + y, for x, y [..., d], and its RMSNorm with w [d]; moves 4 n d elements."""
    return _norm(Stream(x, y), w, None, eps, False)


def bias_dropout_residual_layer_norm(
    x: Tensor,
    b: Tensor,
    residual: Tensor,
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    threshold: float,
    eps: float,
) -> Any:
    """residual + dropout(x + b), [..., d], and its LayerNorm, for key [2]; moves 4 n d elements."""
    return _norm(Stream(x, residual, b, key, threshold), weight, bias, eps, True)
