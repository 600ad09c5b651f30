"""Activations and their derivatives, as device functions that kernels call."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.arithmetic import exp, exp2, reciprocal, sigmoid

__all__ = ["activation", "named", "slope"]

_SHORT = (torch.bfloat16, torch.float16)


def named(name: str, *tensors: Tensor) -> str:
    """The variant of an activation for these tensors: for short dtypes, GELU has a cheaper erf."""
    short = name == "gelu" and all(t.dtype in _SHORT for t in tensors)
    return "gelu_short" if short else name


@triton.jit
def _normal(x):
    """exp(-x^2 / 2), and the normal distribution function of x to within 1e-7.

    Source: Abramowitz and Stegun 1964, 7.1.26, for (1 - erf(|x| / sqrt(2))) / 2.
    """
    bell = exp2(-0.7213475204444817 * (x * x))
    t = reciprocal(1 + 0.2316418882663604 * tl.abs(x))
    tail = 0.5307027145 * t - 0.7265760135
    tail = tail * t + 0.7107068705
    tail = tail * t - 0.142248368
    tail = (tail * t + 0.127414796) * t * bell
    return bell, tl.where(x < 0, tail, 1 - tail)


@triton.jit
def _gelu_tanh_argument(x):
    """Twice the argument of tanh in the approximation, as (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    return x * (1.5957691216057308 + 0.07135481627260025 * x * x)


@triton.jit
def activation(x, NAME: tl.constexpr):
    """``gelu``, ``gelu_short``, ``gelu_tanh``, ``relu`` or ``silu`` of x."""
    if NAME == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_short":
        _, below = _normal(x)
        y = x * below
    elif NAME == "gelu_tanh":
        y = x * sigmoid(_gelu_tanh_argument(x))
    elif NAME == "silu":
        y = x * sigmoid(x)
    else:
        tl.static_assert(NAME == "relu")
        y = tl.where(x < 0, 0.0, x)  # nan stays nan
    return y


@triton.jit
def slope(x, NAME: tl.constexpr):
    """The derivative of `activation` at x."""
    if NAME == "gelu":
        density = exp(-0.5 * x * x) * 0.3989422804014327
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
    elif NAME == "gelu_short":
        bell, below = _normal(x)
        y = below + x * bell * 0.3989422804014327
    elif NAME == "gelu_tanh":
        s = sigmoid(_gelu_tanh_argument(x))
        y = s + x * s * (1 - s) * (1.5957691216057308 + 0.21406444881780074 * x * x)
    elif NAME == "silu":
        s = sigmoid(x)
        y = s * (1 + x * (1 - s))
    else:
        tl.static_assert(NAME == "relu")
        y = tl.where(x <= 0, 0.0, 1.0)
    return y
