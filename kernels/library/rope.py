"""Rotary position embedding, the halves of a head's dim as real and imaginary parts.

Source: Su et al. 2021 (arXiv:2104.09864), in the layout of GPT-NeoX and HuggingFace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.patterns.kernel import Kernel, register_kernel
from torchard.kernels.patterns.pattern import Pattern

__all__ = ["rope"]


def _half_turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q [b, h, s, d], cos and sin [s, d] -> [b, h, s, d]; positions are not followed.

    Their gradient, which hardly anybody wants, would read q, which its own gradient does not.
    """
    return q * cos.detach() + _half_turned(q) * sin.detach()


def _rope_of_batches(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q [b, h, s, d], cos and sin [b, s, d], the positions of each example its own."""
    return _rope(q, cos.unsqueeze(1), sin.unsqueeze(1))


def _rotated(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In one buffer."""
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = q.shape[-1] // 2
    out = q * cos
    # An odd dim has a middle, which goes with the first half.
    first, last = out.split([q.shape[-1] - half, half], -1)
    to_first, to_last = sin.split([q.shape[-1] - half, half], -1)
    first.addcmul_(q[..., half:], to_first, value=-1)
    last.addcmul_(q[..., :half], to_last)
    return out


rope = register_kernel(
    Kernel(
        "rope",
        (
            Pattern(_rope, "b h s d, s d, s d -> b h s d | whole d", name="rope"),
            Pattern(_rope_of_batches, "b h s d, b s d, b s d -> b h s d | whole d", name="rope"),
        ),
        "b h s d, s d, s d -> b h s d | whole d",
        {"cpu": _rotated, "cuda": triton("rope", "rope")},
        {"cuda": triton("rope", "rope_backward")},
    )
)
