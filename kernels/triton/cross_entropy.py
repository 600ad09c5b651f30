"""Mean cross-entropy of logits, forward and backward, where a row is as long as a vocabulary.

Source: Hsu et al. 2024 (arXiv:2410.10989).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.launch import LIMITS, accumulator, cdiv, launch, rows_of, tile_of, wide
from torchard.kernels.triton.softmax import exponentials

__all__ = ["cross_entropy", "cross_entropy_backward"]

# Labels that do not count: torch's default.
IGNORED = tl.constexpr(-100)


@triton.jit
def _losses(
    logits,
    labels,
    losses,
    n,
    d,
    stride,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """nan for a label that is none: nothing else is read for it."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    base, summed, _ = exponentials(logits, None, rows[:, None], n, d, stride, 0, ACC, ROWS, BLOCK)
    label = tl.load(labels + rows, mask=rows < n, other=0)
    known = (rows < n) & (label >= 0) & (label < d)
    picked = tl.load(logits + rows * stride + label, mask=known, other=float("nan")).to(ACC)
    loss = tl.log(summed) - (picked - base)
    tl.store(losses + rows, tl.where(label == IGNORED, 0.0, loss), mask=rows < n)


@triton.jit
def _backward(
    logits,
    labels,
    scale,
    out,
    n,
    d,
    stride,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(softmax - one hot) * scale. Rows are read a second time while they are in the cache."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
    base, summed, _ = exponentials(logits, None, rows, n, d, stride, 0, ACC, ROWS, BLOCK)
    label = tl.load(labels + rows, mask=rows < n, other=0)
    factor = tl.load(scale).to(ACC)
    share = factor / summed[:, None]
    for start in range(0, d, BLOCK):
        cols = start + tl.arange(0, BLOCK)[None, :]
        inside = (rows < n) & (cols < d)
        value = tl.load(logits + rows * stride + cols, mask=inside, other=0).to(ACC)
        change = tl.exp(value - base[:, None]) * share - tl.where(cols == label, factor, 0.0)
        tl.store(out + rows * d + cols, tl.where(label == IGNORED, 0.0, change), mask=inside)


def _count(labels: Tensor) -> Tensor:
    """How many count, []."""
    return (labels != IGNORED.value).sum()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [n, v], labels [n] -> []; n v elements are moved."""
    rows, acc = rows_of(logits), accumulator(logits)
    n, v = rows.shape
    losses = logits.new_empty(n, dtype=wide(acc))
    shape = tile_of(n, min(v, LIMITS.whole))
    launch(
        _losses,
        (cdiv(n, shape.rows),),
        *(rows, labels.contiguous(), losses, n, v, rows.stride(0)),
        on=logits,
        ACC=acc,
        **shape.constants,
    )
    return (losses.sum() / _count(labels)).to(logits.dtype)


def cross_entropy_backward(logits: Tensor, labels: Tensor, cotangent: Tensor) -> Tensor:
    """logits [n, v], labels [n], cotangent [] -> [n, v]; 2 n v elements are moved."""
    rows, acc = rows_of(logits), accumulator(logits)
    n, v = rows.shape
    out = logits.new_empty(logits.shape)
    scale = cotangent.to(wide(acc)) / _count(labels)
    shape = tile_of(n, min(v, LIMITS.whole))
    launch(
        _backward,
        (cdiv(n, shape.rows) if v else 0,),
        *(rows, labels.contiguous(), scale, out, n, v, rows.stride(0)),
        on=logits,
        ACC=acc,
        **shape.constants,
    )
    return out
