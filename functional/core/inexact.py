"""Floating and complex numbers: those that are rounded, and that have derivatives."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["is_inexact", "is_inexact_dtype"]


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
