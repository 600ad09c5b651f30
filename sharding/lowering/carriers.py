"""Conversion to dtypes that collectives support, and back. gloo's maximum also drops NaN.

Dtypes that neither gloo nor NCCL supports are sent as integers: of the same bits where such an integer is
supported, else of a wider type, in which sums wrap and compare as in the original. (Floats of the same
size do not work: a compiler may convert them through a wider type, which changes NaNs.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional.torch_internals.operators import aten

__all__ = ["Carrier", "exchanging", "moving", "reduced", "reducing"]

EmitCall = Callable[..., fx.Node]
Map = Callable[[fx.Node], fx.Node]

# Integers of the same bits.
_AS_BITS = {
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
_WIDER = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32}
# Sums of bools may exceed 255; the upper half of uint32 compares wrongly as int32.
_REDUCED_IN = {**_WIDER, torch.bool: torch.int32, torch.uint32: torch.int64}


class Carrier(NamedTuple):
    """How to encode a value, how to decode it, and how many elements are sent for each of its own."""

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
    """The carrier for an all_to_all of flat values; gloo does not exchange complex values."""
    if not dtype.is_complex:
        return moving(call, dtype)
    return Carrier(
        lambda x: call(aten.reshape.default, call(aten.view_as_real.default, x), [-1]),
        lambda x: call(aten.view_as_complex.default, call(aten.reshape.default, x, [-1, 2])),
        2,
    )


def moving(call: EmitCall, dtype: torch.dtype) -> Carrier:
    """The carrier for values that arrive unchanged."""
    bits = _AS_BITS.get(dtype)
    if bits is None:
        return _in(call, dtype, _WIDER.get(dtype))
    return Carrier(
        lambda x: call(aten.view.dtype, x, bits), lambda x: call(aten.view.dtype, x, dtype)
    )


def reducing(call: EmitCall, dtype: torch.dtype, op: str) -> Carrier:
    """The carrier for sums, maxima and minima over ranks."""
    if op != "sum" and dtype.is_floating_point:
        return _ordered(call, dtype, op)
    return _in(call, dtype, _REDUCED_IN.get(dtype))


def reduced(call: EmitCall, x: fx.Node, dtype: torch.dtype, op: str) -> fx.Node:
    """The sum, maximum or minimum over dim 0 of values that `reducing` encoded, complex ones as pairs."""
    if dtype.is_complex:
        return call(aten.view_as_complex.default, call(aten.sum.dim_IntList, x, [0]))
    if op == "sum":
        return call(aten.sum.dim_IntList, x, [0], dtype=_REDUCED_IN.get(dtype, dtype))
    return call({"max": aten.amax.default, "min": aten.amin.default}[op], x, [0])


def _ordered(call: EmitCall, dtype: torch.dtype, op: str) -> Carrier:
    """Floats as integers of the same order, NaN above all numbers (for a minimum, below them)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bits = torch.int64 if wide == torch.float64 else torch.int32
    info = torch.iinfo(bits)
    nan = info.max if op == "max" else info.min + 1

    def order(x: fx.Node) -> fx.Node:
        """Map between sign-magnitude and two's complement order; its own inverse."""
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
