"""Mean cross-entropy of logits, forward, backward, or both at once, for rows as long as a vocabulary.

Source: Hsu et al. 2024 (arXiv:2410.10989).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchard.kernels.triton.arithmetic import exp
from torchard.kernels.triton.launch import (
    LIMITS,
    accumulator,
    cdiv,
    launch,
    rows_of,
    tile_of,
    wide,
)
from torchard.kernels.triton.softmax import exponentials

__all__ = ["cross_entropy", "cross_entropy_backward", "cross_entropy_joint"]

# The label of ignored rows: torch's default.
IGNORED = tl.constexpr(-100)


@triton.jit
def _cross_entropy(
    logits,
    labels,
    scale,
    losses,
    grad,
    n,
    v,
    stride,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the loss of each row, and (softmax - one hot) * scale, each if its pointer is given.

    The loss is NaN for a label out of range, for which nothing is read. For the gradient, rows are read
    a second time, from the cache.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    down = rows[:, None]
    base, summed = exponentials(logits, down, n, v, stride, ACC, ROWS, BLOCK)
    label = tl.load(labels + rows, mask=rows < n, other=0)
    counts = label != IGNORED
    if losses is not None:
        known = (rows < n) & (label >= 0) & (label < v)
        picked = tl.load(logits + rows * stride + label, mask=known, other=float("nan")).to(ACC)
        loss = tl.log(summed) - (picked - base)
        tl.store(losses + rows, tl.where(counts, loss, 0.0), mask=rows < n)
    if grad is not None:
        factor = tl.where(counts, tl.load(scale).to(ACC), 0.0)[:, None]
        weight = factor / summed[:, None]
        hot = label.to(tl.int32)[:, None]  # compared in one instruction
        for start in range(0, v, BLOCK):
            cols = start + tl.arange(0, BLOCK)[None, :]
            inside = (down < n) & (cols < v)
            value = tl.load(logits + down * stride + cols, mask=inside, other=0).to(ACC)
            value = exp(value - base[:, None]) * weight - tl.where(cols == hot, factor, 0.0)
            tl.store(grad + down * v + cols, value, mask=inside)


def _run(
    logits: Tensor, labels: Tensor, scale: Tensor | None, losses: Tensor | None, out: Tensor | None
) -> None:
    """Write losses [n] and gradients out [n, v], as given, for logits [n, v], labels [n], scale []."""
    rows = rows_of(logits)
    n, v = rows.shape
    shape = tile_of(n, min(v, LIMITS.whole))
    launch(
        _cross_entropy,
        (cdiv(n, shape.rows),),
        *(rows, labels.contiguous(), scale, losses, out, n, v, rows.stride(0)),
        on=logits,
        ACC=accumulator(logits),
        **shape.constants,
    )


def _losses(logits: Tensor) -> Tensor:
    """An uninitialised tensor for the loss of each row, in the dtype of the computation."""
    return logits.new_empty(logits.shape[0], dtype=wide(accumulator(logits)))


def _mean(losses: Tensor, labels: Tensor, logits: Tensor) -> Tensor:
    return (losses.sum() / _count(labels)).to(logits.dtype)


def _count(labels: Tensor) -> Tensor:
    """The number of rows that are not ignored, []."""
    return torch.sum(labels != IGNORED.value)


def _scale(logits: Tensor, labels: Tensor, cotangent: Tensor) -> Tensor:
    return cotangent.to(wide(accumulator(logits))) / _count(labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of logits [n, v] with labels [n]; moves n v elements."""
    losses = _losses(logits)
    _run(logits, labels, None, losses, None)
    return _mean(losses, labels, logits)


def cross_entropy_backward(logits: Tensor, labels: Tensor, cotangent: Tensor) -> Tensor:
    """The gradient of logits [n, v], given labels [n] and a cotangent []; moves 2 n v elements."""
    out = logits.new_empty(logits.shape)
    _run(logits, labels, _scale(logits, labels, cotangent), None, out)
    return out


def cross_entropy_joint(logits: Tensor, labels: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss and the gradient of logits [n, v]; moves 2 n v elements, like the gradient itself."""
    losses, out = _losses(logits), logits.new_empty(logits.shape)
    _run(logits, labels, _scale(logits, labels, cotangent), losses, out)
    return _mean(losses, labels, logits), out
