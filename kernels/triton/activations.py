"""Activations and their derivatives, as parts of kernels."""

import triton
import triton.language as tl

__all__ = ["activation", "slope"]


@triton.jit
def _gelu_tanh_argument(x):
    """Twice that of tanh: (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    return 1.5957691216057308 * x * (1 + 0.044715 * x * x)


@triton.jit
def activation(x, NAME: tl.constexpr):
    """``gelu``, ``gelu_tanh``, ``relu`` or ``silu`` of x."""
    if NAME == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        y = x * tl.sigmoid(_gelu_tanh_argument(x))
    elif NAME == "silu":
        y = x * tl.sigmoid(x)
    else:
        tl.static_assert(NAME == "relu")
        y = tl.where(x < 0, 0.0, x)  # nan stays nan
    return y


@triton.jit
def slope(x, NAME: tl.constexpr):
    """Its derivative at x."""
    if NAME == "gelu":
        density = tl.exp(-0.5 * x * x) * 0.3989422804014327
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
    elif NAME == "gelu_tanh":
        s = tl.sigmoid(_gelu_tanh_argument(x))
        y = s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif NAME == "silu":
        s = tl.sigmoid(x)
        y = s * (1 + x * (1 - s))
    else:
        tl.static_assert(NAME == "relu")
        y = tl.where(x <= 0, 0.0, 1.0)
    return y
