"""Comparison of tensors bit by bit, signs of zeros and NaNs among them."""

from __future__ import annotations

from typing import Any

import torch

from torchard.functional.core import tree

__all__ = ["assert_same_bits", "assert_same_memory"]


def assert_same_bits(have: Any, want: Any) -> None:
    """All leaves have the same shape, dtype and bits."""
    for a, b in zip(tree.leaves(have), tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(_bits(a), _bits(b)), f"{a} instead of {b}"


def assert_same_memory(have: torch.Tensor, want: torch.Tensor) -> None:
    """The same bits, at the same places of a storage; strides of dims of size one count for nothing."""
    assert_same_bits(have, want)
    if not want.numel():
        return
    strides = [[s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in (have, want)]
    assert strides[0] == strides[1]
    assert have.storage_offset() == want.storage_offset()


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
