"""Scatters to a part that are not made in place: the part is written in a copy of the first operand.

torch's `select_scatter`, `slice_scatter` and `diagonal_scatter` copy all of the storage that their first
operand is in (torch 2.13): for a row of a cache, the whole cache.
"""

from __future__ import annotations

import torch

__all__ = ["copied"]


def copied(x: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own, with the strides that torch's scatters give it."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        return x.clone()
    return x.new_empty_strided(x.shape, x.stride()).copy_(x)
