"""The specs of tensors that placeholders represent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TensorSpec", "contiguous", "end_in_storage", "holds", "is_inexact", "is_inexact_dtype"]


@dataclass(frozen=True)
class TensorSpec:
    """The shape, strides, dtype and device of a placeholder's tensor; weak for a Python float."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weak: bool = False

    @staticmethod
    def of(tensor: torch.Tensor, *, weak: bool = False) -> TensorSpec:
        shape = tuple(tensor.shape)
        return TensorSpec(shape, tuple(tensor.stride()), tensor.dtype, tensor.device, weak)

    def empty(self) -> torch.Tensor:
        """An uninitialised tensor of this spec (a fake tensor under a fake mode)."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def contiguous(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> TensorSpec:
    """The TensorSpec of a contiguous tensor."""
    stride, step = [], 1
    for size in reversed(tuple(shape)):
        stride.append(step)
        step *= max(size, 1)
    return TensorSpec(tuple(shape), tuple(reversed(stride)), dtype, torch.device(device))


def end_in_storage(tensor: torch.Tensor) -> int:
    """The end of a tensor's elements in its storage, exclusive; 0 if it has none.

    >>> import torch
    >>> from torchard.functional.core.tensor_spec import end_in_storage
    >>> end_in_storage(torch.arange(12).view(3, 4)[1:, ::2])
    11
    """
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + reach + 1) if tensor.numel() else 0


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a real floating dtype represents every number of a second one.

    The limits of the dtypes are compared, because torch's type promotion does not promote float8 to other
    dtypes.
    """
    if wide == narrow or not (wide.is_floating_point and narrow.is_floating_point):
        return wide == narrow
    large, small = torch.finfo(wide), torch.finfo(narrow)
    return (
        wide.itemsize > narrow.itemsize
        and large.max >= small.max
        and large.eps <= small.eps
        and large.smallest_normal <= small.smallest_normal
    )


def is_inexact(value: Any) -> bool:
    """Whether a value is a tensor of floating or complex numbers.

    >>> import torch
    >>> from torchard.functional.core.tensor_spec import is_inexact
    >>> is_inexact(torch.ones(2)), is_inexact(torch.ones(2) > 0), is_inexact(1.0)
    (True, False, False)
    """
    return isinstance(value, torch.Tensor) and is_inexact_dtype(value.dtype)


def is_inexact_dtype(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating or complex."""
    return dtype.is_floating_point or dtype.is_complex
