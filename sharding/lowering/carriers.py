"""What values travel as: transports carry some dtypes only, and gloo's maximum drops NaN.

Dtypes that neither gloo nor NCCL carries travel as integers that they do: as one of the same bits where
there is one, else as a wider one, in which sums wrap as they would in their own, and order is the same.
(A float of the same size would not do: a compiler may take it through a wider one, which changes NaNs.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional.torch_internals.operators import aten

__all__ = ["Carrier", "exchanging", "moving", "reducing"]

EmitCall = Callable[..., fx.Node]
Map = Callable[[fx.Node], fx.Node]

# Same bits.
_AS_BITS = {
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
}
_WIDER = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32}
# Sums of bools count, more than 255 of them, too; half of uint32 is out of order in int32.
_REDUCED_IN = {**_WIDER, torch.bool: torch.int32, torch.uint32: torch.int64}


class Carrier(NamedTuple):
    """How a value is sent, what has arrived made a value of it again, and elements sent for each."""

    encode: Map
    decode: Map
    each: int = 1


def _same(x: fx.Node) -> fx.Node:
    return x


def _in(call: EmitCall, dtype: torch.dtype, wider: torch.dtype | None) -> Carrier:
    if wider is None:
        return Carrier(_same, _same)
    return Carrier(
        lambda x: call(aten._to_copy.default, x, dtype=wider),
        lambda x: call(aten._to_copy.default, x, dtype=dtype),
    )


def exchanging(call: EmitCall, dtype: torch.dtype) -> Carrier:
    """For flat values that arrive as they were sent: complex ones, too, which gloo does not exchange."""
    if not dtype.is_complex:
        return moving(call, dtype)
    return Carrier(
        lambda x: call(aten.reshape.default, call(aten.view_as_real.default, x), [-1]),
        lambda x: call(aten.view_as_complex.default, call(aten.reshape.default, x, [-1, 2])),
        2,
    )


def moving(call: EmitCall, dtype: torch.dtype) -> Carrier:
    """For what arrives as it was sent."""
    bits = _AS_BITS.get(dtype)
    if bits is None:
        return _in(call, dtype, _WIDER.get(dtype))
    return Carrier(
        lambda x: call(aten.view.dtype, x, bits), lambda x: call(aten.view.dtype, x, dtype)
    )


def reducing(call: EmitCall, dtype: torch.dtype, op: str) -> Carrier:
    """For sums, maxima and minima over ranks."""
    if op != "sum" and dtype.is_floating_point:
        return _ordered(call, dtype, op)
    return _in(call, dtype, _REDUCED_IN.get(dtype))


def _ordered(call: EmitCall, dtype: torch.dtype, op: str) -> Carrier:
    """Floats as integers of the same order, with one NaN above (or, for a minimum, below) all numbers."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bits = torch.int64 if wide == torch.float64 else torch.int32
    info = torch.iinfo(bits)
    nan = info.max if op == "max" else info.min + 1

    def order(x: fx.Node) -> fx.Node:
        """Two's complement order of sign-magnitude bits; its own inverse."""
        flipped = call(aten.bitwise_xor.Scalar, x, info.max)
        return call(aten.where.self, call(aten.lt.Scalar, x, 0), flipped, x)

    def encode(x: fx.Node) -> fx.Node:
        x = call(aten._to_copy.default, x, dtype=wide)
        ordered = order(call(aten.view.dtype, x, bits))
        return call(aten.masked_fill.Scalar, ordered, call(aten.isnan.default, x), nan)

    def decode(x: fx.Node) -> fx.Node:
        is_nan = call(aten.eq.Scalar, x, nan)
        value: Any = call(aten.view.dtype, order(x), wide)
        value = call(aten.masked_fill.Scalar, value, is_nan, math.nan)
        return call(aten._to_copy.default, value, dtype=dtype)

    return Carrier(encode, decode)
