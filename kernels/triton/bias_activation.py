"""activation(x + b), forward and backward, with the bias's gradient in the same pass."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.activations import activation, named, slope
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

__all__ = [
    "bias_gelu",
    "bias_gelu_backward",
    "bias_gelu_tanh",
    "bias_gelu_tanh_backward",
    "bias_relu",
    "bias_relu_backward",
    "bias_silu",
    "bias_silu_backward",
]


@triton.jit
def _forward(
    x,
    b,
    out,
    n,
    d,
    x_stride,
    NAME: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, cols, inside = tile_here(n, d, ROWS, BLOCK)
    bias = tl.load(b + cols, mask=cols < d, other=0).to(ACC)
    value = tl.load(x + rows * x_stride + cols, mask=inside, other=0).to(ACC)
    tl.store(out + rows * d + cols, activation(value + bias, NAME), mask=inside)


@triton.jit
def _backward(
    x,
    b,
    cotangent,
    dx,
    db,
    n,
    d,
    x_stride,
    cotangent_stride,
    NAME: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bias = tl.zeros([1, BLOCK], ACC)
    if b is not None:
        bias += tl.load(b + cols, mask=cols < d, other=0).to(ACC)[None, :]
    summed = tl.zeros([ROWS, BLOCK], ACC)
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (rows < n) & (cols < d)[None, :]
        value = tl.load(x + rows * x_stride + cols[None, :], mask=inside, other=0).to(ACC)
        ct = tl.load(cotangent + rows * cotangent_stride + cols[None, :], mask=inside, other=0)
        grad = ct.to(ACC) * slope(value + bias, NAME)
        tl.store(dx + rows * d + cols[None, :], grad, mask=inside)
        summed += grad
    tl.store(db + tl.program_id(0).to(tl.int64) * d + cols, tl.sum(summed, 0), mask=cols < d)


def _run(name: str, x: Tensor, b: Tensor) -> Tensor:
    """The activation of x [..., d] plus b [d]; moves 2 n d elements."""
    rows = rows_of(x)
    n, d = rows.shape
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, b.dtype))
    shape = tile(rows)
    launch(
        _forward,
        tiles(rows, shape),
        *(rows, b.contiguous(), out, n, d, rows.stride(0)),
        on=x,
        NAME=named(name, x, b),
        ACC=accumulator(out),
        **shape.constants,
    )
    return out


def _vjp(name: str, x: Tensor, b: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and b, for x and a cotangent [..., d] and b [d]; moves 3 n d elements."""
    return _gradients(named(name, x, b), x, b.contiguous(), cotangent)


def bias_relu_backward(result: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and b, given a cotangent and the result, which is positive where x + b is."""
    return _gradients("relu", result, None, cotangent)


def _gradients(name: str, x: Tensor, b: Tensor | None, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and b of the activation of x + b; b is 0 if it is None."""
    rows, ct = rows_of(x), rows_of(cotangent)
    n, d = rows.shape
    shape = tile(rows)
    columns = cdiv(d, shape.block)
    count, options = programs(rows, shape, columns)
    acc = accumulator(x, cotangent) if b is None else accumulator(x, b, cotangent)
    dx = x.new_empty(x.shape)
    db = partials(count, rows, acc)
    launch(
        _backward,
        (count, columns),
        *(rows, b, ct, dx, db, n, d, rows.stride(0), ct.stride(0)),
        on=x,
        NAME=name,
        ACC=acc,
        **shape.constants,
        **options,
    )
    return dx, total(db, cotangent.dtype if b is None else b.dtype)


bias_gelu, bias_gelu_backward = partial(_run, "gelu"), partial(_vjp, "gelu")
bias_gelu_tanh, bias_gelu_tanh_backward = partial(_run, "gelu_tanh"), partial(_vjp, "gelu_tanh")
bias_relu = partial(_run, "relu")
bias_silu, bias_silu_backward = partial(_run, "silu"), partial(_vjp, "silu")
