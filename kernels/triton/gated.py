"""activation(gate) * up, forward and backward."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.activations import activation, named, slope
from torchard.kernels.triton.launch import accumulator, launch, rows_of, tile, tile_here, tiles

__all__ = [
    "geglu",
    "geglu_backward",
    "geglu_tanh",
    "geglu_tanh_backward",
    "swiglu",
    "swiglu_backward",
]


@triton.jit
def _forward(
    gate,
    up,
    out,
    n,
    d,
    gate_stride,
    up_stride,
    NAME: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, cols, inside = tile_here(n, d, ROWS, BLOCK)
    a = tl.load(gate + rows * gate_stride + cols, mask=inside, other=0).to(ACC)
    b = tl.load(up + rows * up_stride + cols, mask=inside, other=0).to(ACC)
    tl.store(out + rows * d + cols, activation(a, NAME) * b, mask=inside)


@triton.jit
def _backward(
    gate,
    up,
    cotangent,
    dgate,
    dup,
    n,
    d,
    gate_stride,
    up_stride,
    cotangent_stride,
    NAME: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, cols, inside = tile_here(n, d, ROWS, BLOCK)
    a = tl.load(gate + rows * gate_stride + cols, mask=inside, other=0).to(ACC)
    b = tl.load(up + rows * up_stride + cols, mask=inside, other=0).to(ACC)
    ct = tl.load(cotangent + rows * cotangent_stride + cols, mask=inside, other=0).to(ACC)
    tl.store(dgate + rows * d + cols, ct * b * slope(a, NAME), mask=inside)
    tl.store(dup + rows * d + cols, ct * activation(a, NAME), mask=inside)


def _run(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """The activation of gate [...] times up [...]; moves 3 elements for each."""
    a, b = rows_of(gate), rows_of(up)
    out = gate.new_empty(gate.shape, dtype=torch.result_type(gate, up))
    shape = tile(a)
    launch(
        _forward,
        tiles(a, shape),
        *(a, b, out, *a.shape, a.stride(0), b.stride(0)),
        on=gate,
        NAME=named(name, gate, up),
        ACC=accumulator(out),
        **shape.constants,
    )
    return out


def _vjp(name: str, gate: Tensor, up: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, for them and a cotangent [...]; moves 5 elements for each."""
    a, b, ct = rows_of(gate), rows_of(up), rows_of(cotangent)
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    shape = tile(a)
    launch(
        _backward,
        tiles(a, shape),
        *(a, b, ct, dgate, dup, *a.shape, a.stride(0), b.stride(0), ct.stride(0)),
        on=gate,
        NAME=named(name, gate, up),
        ACC=accumulator(gate, up, cotangent),
        **shape.constants,
    )
    return dgate, dup


geglu, geglu_backward = partial(_run, "gelu"), partial(_vjp, "gelu")
geglu_tanh, geglu_tanh_backward = partial(_run, "gelu_tanh"), partial(_vjp, "gelu_tanh")
swiglu, swiglu_backward = partial(_run, "silu"), partial(_vjp, "silu")
