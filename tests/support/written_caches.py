"""What tests of compiled writes share: caches, rows that are written, and where values lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["AT", "cache", "kv", "new", "places", "swapped"]

AT = torch.tensor([5])


def cache(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 7).reshape(shape).to(dtype, copy=True)


def kv(**how: Any) -> Tensor:
    return cache(2, 8, 4, **how)


def new(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((2, 1, 4), 9).to(dtype)


def places(value: Any) -> list[int]:
    return [x.data_ptr() for x in (value if isinstance(value, (tuple, list)) else [value])]


def swapped(a: Tensor, b: Tensor, k: Tensor) -> Any:
    return b.index_copy(1, AT, k), a.index_copy(1, AT, k + 1)
