"""Activations in the spellings that the library's kernels match."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["gelu_tanh", "gelu_tanh_written_out", "gelu_written_out"]


def gelu_written_out(x: Tensor) -> Tensor:
    """GELU, written out by the error function."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    """torch's tanh approximation of GELU."""
    return F.gelu(x, approximate="tanh")


def gelu_tanh_written_out(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, written out."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
