"""Stateless layers and initialisers: plain functions of tensors, torch's own semantics.

Parameters are arguments, randomness is a key, and nothing branches on values, so that everything
can be traced, transformed and sharded. The layout of weights is torch's: a linear weight is
[out, in].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.functional import random

__all__ = [
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "init_normal",
    "init_normal_fan_in",
    "init_uniform_fan_in",
    "layer_norm",
    "linear",
    "log_softmax",
    "relu",
    "rms_norm",
    "silu",
    "softmax",
]


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x [..., in], w [out, in], b [out] -> [..., out]."""
    return F.linear(x, w, b)


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """table [vocab, d], integer ids [...] -> rows [..., d]."""
    return F.embedding(ids, table)


def layer_norm(
    x: Tensor, w: Tensor | None = None, b: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Over the last dim: x [..., d], w and b [d] (Ba, Kiros, Hinton, arXiv:1607.06450)."""
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def rms_norm(x: Tensor, w: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Over the last dim: x [..., d], w [d] (Zhang, Sennrich, arXiv:1910.07467).

    The mean of squares of a half-precision x is taken in float32.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y if w is None else y * w


def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """x Φ(x), or its tanh approximation (Hendrycks, Gimpel, arXiv:1606.08415)."""
    return F.gelu(x, approximate=approximate)


def relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return F.relu(x)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x)."""
    return F.silu(x)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) over dim."""
    return torch.softmax(x, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x - log(sum(exp(x))) over dim."""
    return torch.log_softmax(x, dim)


def dropout(key: Tensor, x: Tensor, rate: float | Tensor) -> Tensor:
    """Zero each element with probability `rate`, divide the others by 1 - rate.

    Srivastava et al., JMLR 2014. The mask depends on the key and the element's place alone. A rate
    that is the number 0 returns x, and 1 returns zeros; ValueError outside [0, 1].
    """
    if isinstance(rate, Tensor):
        # At rate 1 the scale is infinite; unselected, it must not make the gradient NaN.
        scale: float | Tensor = torch.where(rate < 1, 1 / (1 - rate), 0)
    elif rate == 0:
        return x
    elif rate == 1:
        return torch.zeros_like(x)
    else:
        scale = 1 / (1 - rate)
    return (x * scale).masked_fill(random.bernoulli(key, rate, x.shape), 0)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
) -> Tensor:
    """Negative log likelihood of class targets: logits [..., classes], targets int64 [...].

    The classes are the *last* dim. Targets equal to `ignore_index` count neither in the sum nor in
    the mean's number. The result is a scalar, or [...] with reduction "none".
    """
    flat = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        reduction=reduction,
        ignore_index=ignore_index,
    )
    return flat.reshape(targets.shape) if reduction == "none" else flat


def init_normal(
    key: Tensor, shape: Sequence[int], std: float = 0.02, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal with mean 0."""
    return random.normal(key, shape, dtype) * std


def init_normal_fan_in(
    key: Tensor, shape: Sequence[int], gain: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normal with std gain / sqrt(in), for a weight [out, in] (He et al., arXiv:1502.01852)."""
    return init_normal(key, shape, gain / math.sqrt(shape[-1]), dtype)


def init_uniform_fan_in(
    key: Tensor, shape: Sequence[int], fan_in: int | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform in ±1 / sqrt(fan_in), as `torch.nn.Linear` has it; fan_in is the last dim if None."""
    bound = 1 / math.sqrt(shape[-1] if fan_in is None else fan_in)
    return random.uniform(key, shape, dtype, -bound, bound)
