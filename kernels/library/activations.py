"""Activations in the spellings that the library's kernels are found in."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["gelu_tanh", "gelu_tanh_written_out", "gelu_written_out"]


def gelu_written_out(x: Tensor) -> Tensor:
    """GELU by its error function."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU's approximation, as torch has it."""
    return F.gelu(x, approximate="tanh")


def gelu_tanh_written_out(x: Tensor) -> Tensor:
    """The same by its tanh."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
