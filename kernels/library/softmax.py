"""Softmax over the last dim: torch's, or written out."""

from __future__ import annotations

import torch
from torch import Tensor

from torchard.kernels.execution.buffers import reused
from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["softmax"]


def _softmax(x: Tensor) -> Tensor:
    """The softmax of [..., d] over d."""
    return torch.softmax(x, -1)


def _to_buffer(x: Tensor) -> Tensor:
    """Softmax written to reused memory, in the layout of torch's result."""
    return torch.softmax(x, -1, out=reused(torch.empty_like(x, device="meta"), x.device))


def _written_out(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def _without_maximum(x: Tensor) -> Tensor:
    """Softmax of small numbers, written out; the kernel subtracts the maximum all the same."""
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


softmax = register_kernel(
    Kernel(
        "softmax",
        (_softmax, _written_out, _without_maximum),
        "... d -> ... d | whole d",
        {"any": _softmax, "cpu": _to_buffer, "cuda": triton("softmax", "softmax")},
        {"cuda": triton("softmax", "softmax_backward")},
    )
)
