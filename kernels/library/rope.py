"""Rotary position embedding, the halves of a head's dim as real and imaginary parts.

Source: Su et al. 2021 (arXiv:2104.09864), in the layout of GPT-NeoX and HuggingFace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchard.kernels.patterns.kernel import Kernel, register_kernel
from torchard.kernels.patterns.pattern import Pattern

__all__ = ["rope"]


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate q [b, h, s, d] by cos and sin [s, d], which have no gradient.

    Their gradient, which is rarely wanted, would read q; the gradient of q does not.
    """
    return q * cos.detach() + _rotate_half(q) * sin.detach()


def _rope_of_batches(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate q [b, h, s, d] by cos and sin [b, s, d], where each example has its own positions."""
    return _rope(q, cos.unsqueeze(1), sin.unsqueeze(1))


def _rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate q with one buffer, the result's."""
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = q.shape[-1] // 2
    out = q * cos
    # The middle of an odd dim belongs to the first half.
    first, last = out.split([q.shape[-1] - half, half], -1)
    sin_first, sin_last = sin.split([q.shape[-1] - half, half], -1)
    first.addcmul_(q[..., half:], sin_first, value=-1)
    last.addcmul_(q[..., :half], sin_last)
    return out


rope = register_kernel(
    Kernel(
        "rope",
        (
            Pattern(_rope, "b h s d, s d, s d -> b h s d | whole d", name="rope"),
            Pattern(_rope_of_batches, "b h s d, b s d, b s d -> b h s d | whole d", name="rope"),
        ),
        "b h s d, s d, s d -> b h s d | whole d",
        {"cpu": _rotated},
    )
)
