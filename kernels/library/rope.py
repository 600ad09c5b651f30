"""Rotary position embedding: halves of a head's dim, or adjacent elements, as complex numbers.

Source: Su et al. 2021 (arXiv:2104.09864): adjacent elements, as in the paper, in Meta's Llama and in
torchtune; halves as in GPT-NeoX and HuggingFace.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchard.kernels.patterns.kernel import Kernel, register_kernel
from torchard.kernels.patterns.pattern import Pattern

__all__ = ["rope", "rope_of_pairs"]


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


def _rope_of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [b, h, s, pairs, 2], or [b, s, h, pairs, 2], by cos and sin, which have no gradient."""
    cos, sin = cos.detach(), sin.detach()
    real, imaginary = x.unbind(-1)
    return torch.stack((real * cos - imaginary * sin, imaginary * cos + real * sin), -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A product of complex numbers, in torch's own vectorised code."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if wide.stride(-1) != 1 or wide.storage_offset() % 2 or any(n % 2 for n in wide.stride()[:-1]):
        wide = wide.contiguous()
    factor = torch.complex(cos.to(wide.dtype), sin.to(wide.dtype))
    return torch.view_as_real(torch.view_as_complex(wide) * factor).to(x.dtype)


def _turned_back(cos: Tensor, sin: Tensor, cotangent: Tensor) -> Tensor:
    return _turned(cotangent, cos, -sin)


rope_of_pairs = register_kernel(
    Kernel(
        "rope_of_pairs",
        tuple(
            Pattern(_rope_of_pairs, dims, name="rope_of_pairs")
            for dims in ("b h s r 2, s r, s r -> b h s r 2", "b s h r 2, s 1 r, s 1 r -> b s h r 2")
        ),
        "b h s r 2, s r, s r -> b h s r 2",
        {"cpu": _turned},
        {"cpu": _turned_back},
    )
)
