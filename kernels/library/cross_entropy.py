"""Cross-entropy of logits, and of a product that would be the logits.

Source: Wijmans et al. 2024 (arXiv:2411.09009) and Hsu et al. 2024 (arXiv:2410.10989) for logits
that are never stored: rows are independent, so one chunk of them at a time is enough.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.kernels.kernel import Kernel, register_kernel

__all__ = ["cross_entropy", "linear_cross_entropy"]

# Labels that do not count: torch's default.
_IGNORED = -100
# Elements of the logits that exist at a time.
_CHUNK = 1 << 21


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


def _chunks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _picked(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows count, and a label for each, [n, 1]."""
    counts = labels != _IGNORED
    return counts, torch.where(counts, labels, 0).unsqueeze(-1)


def _sum_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [m, v], labels [m] -> the sum of their losses, wide."""
    counts, picked = _picked(labels)
    rows = logits.to(_wide(logits.dtype))
    losses = torch.log_softmax(rows, -1).gather(-1, picked).squeeze(-1)
    return -losses.masked_fill_(~counts, 0).sum()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """logits [n, v], labels [n] -> []."""
    total = logits.new_zeros((), dtype=_wide(logits.dtype))
    for rows in _chunks(*logits.shape):
        total += _sum_of_rows(logits[rows], labels[rows])
    return (total / (labels != _IGNORED).sum()).to(logits.dtype)


def _gradient_of_logits(logits: Tensor, labels: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """softmax - one hot of rows [m, v], in a buffer; returned is what to multiply it by, [m, 1]."""
    counts, picked = _picked(labels)
    torch.softmax(logits, -1, out=out)
    out.scatter_add_(-1, picked, out.new_full((), -1).expand(picked.shape))
    return (counts * scale).unsqueeze(-1)


def _scale(labels: Tensor, cotangent: Tensor) -> Tensor:
    wide = cotangent.to(_wide(cotangent.dtype))
    return wide / (labels != _IGNORED).sum()


def _cross_entropy_vjp(logits: Tensor, labels: Tensor, cotangent: Tensor) -> Tensor:
    """-> [n, v], one buffer of that size; rows are rounded once, wherever dtypes are short."""
    scale = _scale(labels, cotangent)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for rows in _chunks(*logits.shape):
        wide = logits[rows].to(scale.dtype)
        change = out[rows] if out.dtype == scale.dtype else torch.empty_like(wide)
        change.mul_(_gradient_of_logits(wide, labels[rows], scale, change))
        if out.dtype != scale.dtype:
            out[rows] = change
    return out


cross_entropy = register_kernel(
    Kernel(
        "cross_entropy",
        (_loss, _by_gather, _by_logsumexp),
        "n v, n:int64 -> | whole n v",
        {"any": _cross_entropy},
        {"any": _cross_entropy_vjp},
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
    for rows in _chunks(x.shape[0], w.shape[1]):
        total += _sum_of_rows(x[rows] @ w, labels[rows])
    return (total / (labels != _IGNORED).sum()).to(x.dtype)


def _linear_cross_entropy_vjp(
    x: Tensor, w: Tensor, labels: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor]:
    """-> [n, d], [d, v]; logits are computed again, the weight's gradient is summed up wide."""
    scale = _scale(labels, cotangent)
    to_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    # As the weight lies: added to without a copy, and what reads it next expects it so.
    to_w = torch.zeros_like(w, dtype=scale.dtype)
    for rows in _chunks(x.shape[0], w.shape[1]):
        logits = (x[rows] @ w).to(scale.dtype)
        factor = _gradient_of_logits(logits, labels[rows], scale, logits)
        # What is multiplied by the factor is the narrow side of both products.
        to_x[rows] = (logits.to(x.dtype) @ w.t()).mul_(factor)
        to_w.addmm_((x[rows] * factor).t(), logits)
    return to_x, to_w.to(w.dtype)


linear_cross_entropy = register_kernel(
    Kernel(
        "linear_cross_entropy",
        (_linear_loss, _linear_by_gather),
        "n d, d v, n:int64 -> | whole n d v",
        {"any": _linear_cross_entropy},
        {"any": _linear_cross_entropy_vjp},
    )
)
