"""Cross-entropy of logits.

Source: Hsu et al. 2024 (arXiv:2410.10989): rows are independent, so they are computed in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.kernels.execution.buffers import reused
from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = [
    "by_gather",
    "cross_entropy",
    "less_one_hot",
    "mean_of",
    "picked_of",
    "scale_of",
    "wide",
]

# The label of ignored rows: torch's default.
_IGNORED = -100
# Elements in a chunk of given logits: few enough for a cache, enough to amortise the calls.
_CHUNK = 1 << 20


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def by_gather(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss written out by gather, for which an ignored label is an error."""
    rows = torch.log_softmax(logits, -1)
    return -rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean()


def _by_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, -1) - picked).mean()


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def picked_of(labels: Tensor) -> tuple[Tensor, Tensor]:
    """A mask of the rows that are not ignored, [n], and a valid label for each row, [n, 1]."""
    counts = labels != _IGNORED
    return counts, torch.where(counts, labels, 0).unsqueeze(-1)


def _sum_of_rows(logits: Tensor, labels: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of the losses of logits [m, v] with labels [m]; ``out`` receives log_softmax, widened."""
    counts, picked = picked_of(labels)
    rows = logits.to(wide(logits.dtype))
    losses = torch.log_softmax(rows, -1, out=out).gather(-1, picked).squeeze(-1)
    return -losses.masked_fill_(~counts, 0).sum()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of logits [n, v] with labels [n]."""
    total = logits.new_zeros((), dtype=wide(logits.dtype))
    for rows in _chunks(*logits.shape):
        total += _sum_of_rows(logits[rows], labels[rows])
    return mean_of(total, labels, logits.dtype)


def less_one_hot(softmax: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    """Subtract one-hot labels from softmax [m, v] in place; return the factor of each row, [m, 1]."""
    counts, picked = picked_of(labels)
    softmax.scatter_add_(-1, picked, softmax.new_full((), -1).expand(picked.shape))
    # Not a product: the scale is infinite if all labels are ignored.
    return torch.where(counts, scale, 0).unsqueeze(-1)


def scale_of(labels: Tensor, cotangent: Tensor) -> Tensor:
    return cotangent.to(wide(cotangent.dtype)) / (labels != _IGNORED).sum()


def _cross_entropy_vjp(logits: Tensor, labels: Tensor, cotangent: Tensor) -> Tensor:
    """The gradient of the logits, [n, v], the only buffer of that size."""
    scale = scale_of(labels, cotangent)
    out = _like(logits)
    for rows in _chunks(*logits.shape):
        with _widened(out[rows], scale.dtype) as change:
            torch.softmax(logits[rows].to(scale.dtype), -1, out=change)
            change.mul_(less_one_hot(change, labels[rows], scale))
    return out


def _cross_entropy_joint(
    logits: Tensor, labels: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the logits, [n, v], computed from log_softmax in place."""
    scale = scale_of(labels, cotangent)
    out, total = _like(logits), scale.new_zeros(())
    for rows in _chunks(*logits.shape):
        with _widened(out[rows], scale.dtype) as change:
            total += _sum_of_rows(logits[rows], labels[rows], change)
            change.exp_().mul_(less_one_hot(change, labels[rows], scale))
    return mean_of(total, labels, logits.dtype), out


def _like(x: Tensor) -> Tensor:
    """A contiguous tensor like x, uninitialised, in reused memory."""
    return reused(torch.empty(x.shape, dtype=x.dtype, device="meta"), x.device)


@contextmanager
def _widened(narrow: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor of a dtype to compute in, which is rounded to ``narrow`` once, at the end."""
    wide = narrow if narrow.dtype == dtype else torch.empty_like(narrow, dtype=dtype)
    yield wide
    if wide is not narrow:
        narrow.copy_(wide)


def mean_of(total: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    return (total / (labels != _IGNORED).sum()).to(dtype)


cross_entropy = register_kernel(
    Kernel(
        "cross_entropy",
        (_loss, by_gather, _by_logsumexp),
        "n v, n:int64 -> | whole n v",
        {"any": _cross_entropy, "cuda": triton("cross_entropy", "cross_entropy")},
        {
            "any": _cross_entropy_vjp,
            "cuda": triton("cross_entropy", "cross_entropy_backward"),
        },
        joint={
            "cpu": _cross_entropy_joint,
            "cuda": triton("cross_entropy", "cross_entropy_joint"),
        },
        by_time=True,
    )
)
