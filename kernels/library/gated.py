"""Gated activations: what the first product of a gated MLP goes through.

Source: Shazeer 2020, "GLU variants improve Transformer" (arXiv:2002.05202).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["geglu", "geglu_tanh", "swiglu"]


def _gate(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    return gated


def _silu_written_out(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu_written_out(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_written_out(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _kernel(name: str, *activations: Callable[[Tensor], Tensor]) -> Kernel:
    """gate [...], up [...] -> [...]."""
    run, vjp = triton("gated", name), triton("gated", f"{name}_backward")
    references = tuple(map(_gate, activations))
    return register_kernel(
        Kernel(name, references, "..., ... -> ...", {"cuda": run}, {"cuda": vjp})
    )


swiglu = _kernel("swiglu", F.silu, _silu_written_out)
geglu = _kernel("geglu", F.gelu, _gelu_written_out)
geglu_tanh = _kernel("geglu_tanh", _gelu_tanh, _gelu_tanh_written_out)
