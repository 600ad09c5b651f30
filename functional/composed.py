"""Functions of torch that look at values, but only to warn: the same of operations that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["COMPOSED"]


def _cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch.cov; weights are not checked for being positive."""
    if input.ndim > 2:
        raise RuntimeError(f"cov(): expected input to have two or fewer dimensions but got {input.ndim}")
    rows = input if input.ndim == 2 else input.reshape(1, -1)
    weights = _product(fweights, aweights)
    if weights is None:
        count: Any = rows.shape[1]
        mean, factor = rows.mean(1, keepdim=True), max(count - correction, 0)
        centred = rows - mean
        scaled = centred
    else:
        total = weights.sum()
        mean = (rows * weights).sum(1, keepdim=True) / total
        factor = _norm_factor(total, weights, aweights, correction)
        centred = rows - mean
        scaled = centred * weights
    covariance: torch.Tensor = scaled @ centred.mT.conj() / factor
    return covariance.squeeze()


def _product(fweights: torch.Tensor | None, aweights: torch.Tensor | None) -> torch.Tensor | None:
    if fweights is None or aweights is None:
        return aweights if fweights is None else fweights
    return fweights * aweights


def _norm_factor(
    total: torch.Tensor, weights: torch.Tensor, aweights: torch.Tensor | None, correction: int
) -> torch.Tensor:
    """What the sum of products is divided by, not below zero."""
    if aweights is None or correction == 0:
        return (total - correction).clamp(min=0)
    return (total - correction * (weights * aweights).sum() / total).clamp(min=0)


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    """torch.corrcoef: covariances over standard deviations."""
    covariance = _cov(input)
    if covariance.ndim == 0:
        return covariance / covariance
    deviation = covariance.diagonal().real.sqrt()
    scaled = covariance / deviation[:, None] / deviation[None, :]
    if scaled.is_complex():
        return torch.complex(scaled.real.clamp(-1, 1), scaled.imag.clamp(-1, 1))
    return scaled.clamp(-1, 1)


COMPOSED: dict[Any, Callable[..., Any]] = {
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
}
