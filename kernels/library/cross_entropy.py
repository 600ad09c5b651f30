"""Cross-entropy of logits, and of a product whose result is the logits.

Source: Wijmans et al. 2024 (arXiv:2411.09009) and Hsu et al. 2024 (arXiv:2410.10989) for logits
that are never stored whole: rows are independent, so they are computed in chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.kernels.execution.buffers import Buffers
from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["cross_entropy", "linear_cross_entropy"]

# The label of ignored rows: torch's default.
_IGNORED = -100
# Elements in a chunk of given logits: few enough for a cache, enough to amortise the calls.
_CHUNK = 1 << 20
# Elements in a chunk of computed logits: products of more rows are faster.
_LOGITS = 1 << 22


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def _by_gather(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss written out by gather, for which an ignored label is an error."""
    rows = torch.log_softmax(logits, -1)
    return -rows.gather(-1, labels.unsqueeze(-1)).squeeze(-1).mean()


def _by_logsumexp(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, -1) - picked).mean()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(rows: int, width: int, elements: int = 0) -> Iterator[slice]:
    step = max(1, (elements or _CHUNK) // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _picked(labels: Tensor) -> tuple[Tensor, Tensor]:
    """A mask of the rows that are not ignored, [n], and a valid label for each row, [n, 1]."""
    counts = labels != _IGNORED
    return counts, torch.where(counts, labels, 0).unsqueeze(-1)


def _sum_of_rows(logits: Tensor, labels: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of the losses of logits [m, v] with labels [m]; ``out`` receives log_softmax, widened."""
    counts, picked = _picked(labels)
    rows = logits.to(_wide(logits.dtype))
    losses = torch.log_softmax(rows, -1, out=out).gather(-1, picked).squeeze(-1)
    return -losses.masked_fill_(~counts, 0).sum()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of logits [n, v] with labels [n]."""
    total = logits.new_zeros((), dtype=_wide(logits.dtype))
    for rows in _chunks(*logits.shape):
        total += _sum_of_rows(logits[rows], labels[rows])
    return _mean(total, labels, logits.dtype)


def _less_one_hot(softmax: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    """Subtract one-hot labels from softmax [m, v] in place; return the factor of each row, [m, 1]."""
    counts, picked = _picked(labels)
    softmax.scatter_add_(-1, picked, softmax.new_full((), -1).expand(picked.shape))
    # Not a product: the scale is infinite if all labels are ignored.
    return torch.where(counts, scale, 0).unsqueeze(-1)


def _scale(labels: Tensor, cotangent: Tensor) -> Tensor:
    wide = cotangent.to(_wide(cotangent.dtype))
    return wide / (labels != _IGNORED).sum()


def _cross_entropy_vjp(logits: Tensor, labels: Tensor, cotangent: Tensor) -> Tensor:
    """The gradient of the logits, [n, v], the only buffer of that size."""
    scale = _scale(labels, cotangent)
    out = _like(logits)
    for rows in _chunks(*logits.shape):
        with _widened(out[rows], scale.dtype) as change:
            torch.softmax(logits[rows].to(scale.dtype), -1, out=change)
            change.mul_(_less_one_hot(change, labels[rows], scale))
    return out


def _cross_entropy_joint(
    logits: Tensor, labels: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the logits, [n, v], computed from log_softmax in place."""
    scale = _scale(labels, cotangent)
    out, total = _like(logits), scale.new_zeros(())
    for rows in _chunks(*logits.shape):
        with _widened(out[rows], scale.dtype) as change:
            total += _sum_of_rows(logits[rows], labels[rows], change)
            change.exp_().mul_(_less_one_hot(change, labels[rows], scale))
    return _mean(total, labels, logits.dtype), out


def _like(x: Tensor) -> Tensor:
    """A contiguous tensor like x, uninitialised, in reused memory."""
    (out,) = Buffers.of([torch.empty(x.shape, dtype=x.dtype, device="meta")]).new(x.device)
    return out


@contextmanager
def _widened(narrow: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor of a dtype to compute in, which is rounded to ``narrow`` once, at the end."""
    wide = narrow if narrow.dtype == dtype else torch.empty_like(narrow, dtype=dtype)
    yield wide
    if wide is not narrow:
        narrow.copy_(wide)


def _mean(total: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    return (total / (labels != _IGNORED).sum()).to(dtype)


cross_entropy = register_kernel(
    Kernel(
        "cross_entropy",
        (_loss, _by_gather, _by_logsumexp),
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


# -- cross-entropy of a product -------------------------------------------------------------------


def _linear_loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, labels)


def _linear_by_gather(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return _by_gather(x @ w, labels)


def _linear_cross_entropy(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of x [n, d] @ w [d, v] with labels [n], by chunks [m, v] of the logits."""
    total = x.new_zeros((), dtype=_wide(x.dtype))
    for rows in _chunks(x.shape[0], w.shape[1], _LOGITS):
        total += _sum_of_products(x[rows], w, labels[rows])
    return _mean(total, labels, x.dtype)


def _sum_of_products(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """The sum of the losses of x [m, d] @ w [d, v]; the logits are freed when it returns."""
    logits = (x @ w).to(_wide(x.dtype))
    return _sum_of_rows(logits, labels, logits)


class _Gradients:
    """The gradients of x [n, d] and w [d, v], accumulated over chunks of the logits.

    The logits of a chunk become their own gradient in place. The sum for w is in a wide dtype.
    """

    def __init__(self, x: Tensor, w: Tensor, labels: Tensor, cotangent: Tensor) -> None:
        self.x, self.w, self.labels = x, w, labels
        self.scale = _scale(labels, cotangent)
        self.to_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        # In the weight's layout: adding needs no copy then, and readers of the gradient expect it.
        self.to_w = torch.zeros_like(w, dtype=self.scale.dtype)

    def add(self, rows: slice) -> None:
        """Add the gradients of some rows."""
        logits = self._logits(rows)
        self._add(rows, torch.softmax(logits, -1, out=logits))

    def add_with_loss(self, rows: slice) -> Tensor:
        """Add the gradients of some rows, and return the sum of their losses."""
        logits = self._logits(rows)
        loss = _sum_of_rows(logits, self.labels[rows], logits)
        self._add(rows, logits.exp_())
        return loss

    def _logits(self, rows: slice) -> Tensor:
        return (self.x[rows] @ self.w).to(self.scale.dtype)

    def _add(self, rows: slice, softmax: Tensor) -> None:
        factor = _less_one_hot(softmax, self.labels[rows], self.scale)
        # The factor is applied on the side of [m, d], which is smaller than [m, v].
        self.to_x[rows] = (softmax.to(self.x.dtype) @ self.w.t()).mul_(factor)
        self.to_w.addmm_((self.x[rows] * factor).t(), softmax)

    @property
    def done(self) -> tuple[Tensor, Tensor]:
        """The gradients of x and w, in their dtypes."""
        return self.to_x, self.to_w.to(self.w.dtype)


def _linear_cross_entropy_vjp(
    x: Tensor, w: Tensor, labels: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x, [n, d], and w, [d, v]; the logits are recomputed."""
    gradients = _Gradients(x, w, labels, cotangent)
    for rows in _chunks(x.shape[0], w.shape[1], _LOGITS):
        gradients.add(rows)
    return gradients.done


def _linear_cross_entropy_joint(
    x: Tensor, w: Tensor, labels: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and the gradients of x, [n, d], and w, [d, v]; the logits are computed once."""
    gradients = _Gradients(x, w, labels, cotangent)
    total = gradients.scale.new_zeros(())
    for rows in _chunks(x.shape[0], w.shape[1], _LOGITS):
        total += gradients.add_with_loss(rows)
    return _mean(total, labels, x.dtype), *gradients.done


linear_cross_entropy = register_kernel(
    Kernel(
        "linear_cross_entropy",
        (_linear_loss, _linear_by_gather),
        "n d, d v, n:int64 -> | whole n d v",
        {"any": _linear_cross_entropy},
        {"any": _linear_cross_entropy_vjp},
        joint={"any": _linear_cross_entropy_joint},
    )
)
