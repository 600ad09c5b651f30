"""The value of a residual stream, x, x + y, or y + dropout(x + bias), computed where kernels read it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.launch import accumulator, rows_of
from torchard.kernels.triton.philox import WORDS, dropped

__all__ = ["Stream", "behind_dropout", "stream"]

# The digits of a probability that its threshold of 32 bits determines, as in the library.
_DIGITS = 9


@dataclass(frozen=True)
class Stream:
    """The operands of a value: x and y [..., d], bias [d], key [2]; without a key nothing is dropped."""

    x: Tensor
    y: Tensor | None = None
    bias: Tensor | None = None
    key: Tensor | None = None
    threshold: float = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and their length."""
        return math.prod(self.x.shape[:-1]), self.x.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the value."""
        given = [t.dtype for t in (self.x, self.y, self.bias) if t is not None]
        return reduce(torch.promote_types, given)

    @property
    def source(self) -> tuple[Any, ...]:
        """The ``source`` of `stream`; kernels read n and d, its first two items, themselves."""
        x, y = rows_of(self.x), None if self.y is None else rows_of(self.y)
        bias = None if self.bias is None else self.bias.contiguous()
        key = None if self.key is None else self.key.contiguous()
        return *x.shape, key, x, x.stride(0), y, 0 if y is None else y.stride(0), bias

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of kernels that call `stream`."""
        acc = accumulator(*(t for t in (self.x, self.y, self.bias) if t is not None))
        return {"ACC": acc, "DROPOUT": dropout(self.threshold, self.shape[1])}


def dropout(threshold: float, d: int) -> tuple[int, float, bool]:
    """The constant DROPOUT: a threshold of words, the scale of the rest, whether rows are aligned."""
    p = round(threshold / 2**32, _DIGITS)
    return math.ceil(threshold), 1 / (1 - p), d % WORDS.value == 0


@triton.jit
def behind_dropout(
    value,
    key,
    rows,
    first,
    d,
    DROPOUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dropout of a value [ROWS, BLOCK], columns from ``first`` on: elements are dropped or scaled."""
    drop = dropped(key, rows, first, d, DROPOUT[0], DROPOUT[2], ROWS, BLOCK)
    return tl.where(drop, 0.0, value * DROPOUT[1])


@triton.jit
def stream(
    source,
    rows,
    first,
    DROPOUT: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The value in rows [ROWS, 1] and columns [first, first + BLOCK), 0 outside."""
    n, d, key, x, x_stride, y, y_stride, bias = source
    cols = first + tl.arange(0, BLOCK)[None, :]
    inside = (rows < n) & (cols < d)
    value = tl.load(x + rows * x_stride + cols, mask=inside, other=0).to(ACC)
    if bias is not None:
        value += tl.load(bias + cols, mask=cols < d, other=0).to(ACC)
    if key is not None:
        value = behind_dropout(value, key, rows, first, d, DROPOUT, ROWS, BLOCK)
    if y is not None:
        value += tl.load(y + rows * y_stride + cols, mask=inside, other=0).to(ACC)
    return value
