"""Exponentials and quotients of float32 by the device's approximations, a few instructions each.

Triton's own treat subnormal numbers separately and round quotients correctly, which takes more
instructions than a memory-bound kernel has to spare. Here subnormal numbers are flushed to 0.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

__all__ = ["exp", "exp2", "reciprocal", "sigmoid"]

# Triton's interpreter has no libdevice.
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
