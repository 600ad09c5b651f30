"""Cross-entropy of logits, and of a product that would be the logits.

Source: Wijmans et al. 2024 (arXiv:2411.09009) and Hsu et al. 2024 (arXiv:2410.10989) for logits
that are never stored: rows are independent, so one chunk of them at a time is enough.
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

# Labels that do not count: torch's default.
_IGNORED = -100
# Elements of rows that are worked on at a time: some fit a cache, and are worth their calls.
_CHUNK = 1 << 20
# Elements of logits that exist at a time: products of more rows are the quicker.
_LOGITS = 1 << 22


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def _by_gather(logits: Tensor, labels: Tensor) -> Tensor:
    """Written out. A label that does not count is an error here."""
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
    """Which rows count, and a label for each, [n, 1]."""
    counts = labels != _IGNORED
    return counts, torch.where(counts, labels, 0).unsqueeze(-1)


def _sum_of_rows(logits: Tensor, labels: Tensor, out: Tensor | None = None) -> Tensor:
    """logits [m, v], labels [m] -> the sum of their losses; out: for log_softmax, as wide."""
    counts, picked = _picked(labels)
    rows = logits.to(_wide(logits.dtype))
    losses = torch.log_softmax(rows, -1, out=out).gather(-1, picked).squeeze(-1)
    return -losses.masked_fill_(~counts, 0).sum()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [n, v], labels [n] -> []."""
    total = logits.new_zeros((), dtype=_wide(logits.dtype))
    for rows in _chunks(*logits.shape):
        total += _sum_of_rows(logits[rows], labels[rows])
    return _mean(total, labels, logits.dtype)


def _less_one_hot(softmax: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
    """Of rows [m, v], in place; returned is what to multiply them by, [m, 1]."""
    counts, picked = _picked(labels)
    softmax.scatter_add_(-1, picked, softmax.new_full((), -1).expand(picked.shape))
    # Not a product: with no label that counts, the scale is infinite.
    return torch.where(counts, scale, 0).unsqueeze(-1)


def _scale(labels: Tensor, cotangent: Tensor) -> Tensor:
    wide = cotangent.to(_wide(cotangent.dtype))
    return wide / (labels != _IGNORED).sum()


def _cross_entropy_vjp(logits: Tensor, labels: Tensor, cotangent: Tensor) -> Tensor:
    """-> [n, v], one buffer of that size."""
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
    """-> [], [n, v]: the rows that the loss was picked from become the gradient."""
    scale = _scale(labels, cotangent)
    out, total = _like(logits), scale.new_zeros(())
    for rows in _chunks(*logits.shape):
        with _widened(out[rows], scale.dtype) as change:
            total += _sum_of_rows(logits[rows], labels[rows], change)
            change.exp_().mul_(_less_one_hot(change, labels[rows], scale))
    return _mean(total, labels, logits.dtype), out


def _like(x: Tensor) -> Tensor:
    """Contiguous, in memory of our own."""
    (made,) = Buffers.of([torch.empty(x.shape, dtype=x.dtype, device="meta")]).new(x.device)
    return made


@contextmanager
def _widened(narrow: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A place to work in, rounded once at the end where dtypes are short."""
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


# -- of a product ---------------------------------------------------------------------------------


def _linear_loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, labels)


def _linear_by_gather(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return _by_gather(x @ w, labels)


def _linear_cross_entropy(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """x [n, d], w [d, v], labels [n] -> []; logits [m, v] of m rows at a time."""
    total = x.new_zeros((), dtype=_wide(x.dtype))
    for rows in _chunks(x.shape[0], w.shape[1], _LOGITS):
        total += _sum_of_products(x[rows], w, labels[rows])
    return _mean(total, labels, x.dtype)


def _sum_of_products(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """x [m, d] -> the sum of the rows' losses. One function, so that its logits are gone at the end."""
    logits = (x @ w).to(_wide(x.dtype))
    return _sum_of_rows(logits, labels, logits)


class _Gradients:
    """Of x [n, d] and w [d, v], by chunks of logits that turn into their own; w's is summed up wide."""

    def __init__(self, x: Tensor, w: Tensor, labels: Tensor, cotangent: Tensor) -> None:
        self.x, self.w, self.labels = x, w, labels
        self.scale = _scale(labels, cotangent)
        self.to_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        # As the weight lies: added to without a copy, and what reads it next expects it so.
        self.to_w = torch.zeros_like(w, dtype=self.scale.dtype)

    def add(self, rows: slice) -> None:
        """Those of some rows."""
        logits = self._logits(rows)
        self._add(rows, torch.softmax(logits, -1, out=logits))

    def add_with_loss(self, rows: slice) -> Tensor:
        """And the sum of the rows' losses."""
        logits = self._logits(rows)
        loss = _sum_of_rows(logits, self.labels[rows], logits)
        self._add(rows, logits.exp_())
        return loss

    def _logits(self, rows: slice) -> Tensor:
        return (self.x[rows] @ self.w).to(self.scale.dtype)

    def _add(self, rows: slice, softmax: Tensor) -> None:
        factor = _less_one_hot(softmax, self.labels[rows], self.scale)
        # What is multiplied by the factor is the narrow side of both products.
        self.to_x[rows] = (softmax.to(self.x.dtype) @ self.w.t()).mul_(factor)
        self.to_w.addmm_((self.x[rows] * factor).t(), softmax)

    @property
    def done(self) -> tuple[Tensor, Tensor]:
        return self.to_x, self.to_w.to(self.w.dtype)


def _linear_cross_entropy_vjp(
    x: Tensor, w: Tensor, labels: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    """-> [n, d], [d, v]; logits are computed again."""
    gradients = _Gradients(x, w, labels, cotangent)
    for rows in _chunks(x.shape[0], w.shape[1], _LOGITS):
        gradients.add(rows)
    return gradients.done


def _linear_cross_entropy_joint(
    x: Tensor, w: Tensor, labels: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> [], [n, d], [d, v]; logits are computed once."""
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
