"""Replacements for functions of torch that read values, but only to validate them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

__all__ = ["COMPOSED"]


def _cov(
    input: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch.cov, without the check that weights are positive."""
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
    """The divisor of the sum of products, at least zero."""
    if aweights is None or correction == 0:
        return (total - correction).clamp(min=0)
    return (total - correction * (weights * aweights).sum() / total).clamp(min=0)


def _corrcoef(input: torch.Tensor) -> torch.Tensor:
    """torch.corrcoef: covariances divided by standard deviations."""
    covariance = _cov(input)
    if covariance.ndim == 0:
        return covariance / covariance
    deviation = covariance.diagonal().real.sqrt()
    scaled = covariance / deviation[:, None] / deviation[None, :]
    if scaled.is_complex():
        return torch.complex(scaled.real.clamp(-1, 1), scaled.imag.clamp(-1, 1))
    return scaled.clamp(-1, 1)


def _gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """F.gaussian_nll_loss without its check for negative variances: they are clamped to eps."""
    if not isinstance(var, torch.Tensor):
        var = input.new_full(input.shape, var)
    elif var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif not _one_dim_is_1(var.shape, input.shape):
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(reduction + " is not valid")
    # Clamped variances keep their gradient: torch clamps them under no_grad.
    var = torch.where(var < eps, var - var.detach() + eps, var)
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _one_dim_is_1(shape: torch.Size, of: torch.Size) -> bool:
    """Whether the shapes are equal, except for at most one dim, which is 1."""
    if len(shape) != len(of):
        return False
    other = [n for n, m in zip(shape, of, strict=True) if n != m]
    return not other or other == [1]


COMPOSED: dict[Any, Callable[..., Any]] = {
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
}
