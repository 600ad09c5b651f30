"""Norms over the last dim."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["layer_norm", "rms_norm"]


def _rms_norm(x: Tensor, w: Tensor, eps: Any = ...) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], w, eps)


def _rms_norm_cast_first(x: Tensor, w: Tensor, eps: Any = ...) -> Tensor:
    """RMSNorm rounded to the input's dtype before the weight is applied, as in HuggingFace."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return w * h.to(x.dtype)


def _rms_norm_wide_variance(x: Tensor, w: Tensor, eps: Any = ...) -> Tensor:
    """RMSNorm in which only the variance is computed in float32, as in HuggingFace's T5."""
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + eps)).to(x.dtype)


def _rms_norm_divided(x: Tensor, w: Tensor, eps: Any = ...) -> Tensor:
    """RMSNorm by division, whose derivative is written differently from rsqrt's."""
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def _rms_norm_by_hand(x: Tensor, w: Tensor, eps: Any = ...) -> Tensor:
    """RMSNorm in the dtype of the input, rounded after every operation."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def _layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: Any = ...) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


rms_norm = register_kernel(
    Kernel(
        "rms_norm",
        (
            _rms_norm,
            _rms_norm_cast_first,
            _rms_norm_wide_variance,
            _rms_norm_divided,
            _rms_norm_by_hand,
        ),
        "... d, d -> ... d | whole d",
    )
)
layer_norm = register_kernel(
    Kernel(
        "layer_norm",
        (_layer_norm,),
        "... d, d, d -> ... d | whole d",
        {"cuda": triton("norms", "layer_norm")},
        {"cuda": triton("norms_backward", "layer_norm_backward")},
    )
)
