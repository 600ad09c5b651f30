"""Exponentials and quotients of float32 as devices compute them: a few instructions each.

What Triton makes of them takes numbers apart that are too small for float32, and rounds quotients in
full: more instructions than a kernel has while its bytes are on the way. Here what is too small is 0.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["exp", "exp2", "reciprocal", "sigmoid"]

# The interpreter has no device's functions.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def exp2(x):
    exact: tl.constexpr = INTERPRETED or x.dtype == tl.float64
    return tl.exp2(x) if exact else libdevice.exp2(x)


@triton.jit
def exp(x):
    return tl.exp(x) if x.dtype == tl.float64 else exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(x):
    exact: tl.constexpr = INTERPRETED or x.dtype == tl.float64
    return 1 / x if exact else libdevice.fast_dividef(1.0, x)


@triton.jit
def sigmoid(x):
    return reciprocal(1 + exp(-x))
