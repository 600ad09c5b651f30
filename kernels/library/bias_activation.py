"""A bias and an activation, as behind every first linear of an MLP."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["bias_gelu", "bias_gelu_tanh", "bias_relu", "bias_silu"]


def _behind_bias(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def biased(x: Tensor, b: Tensor) -> Tensor:
        return activation(x + b)

    return biased


def _gelu_written_out(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_written_out(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _kernel(name: str, *activations: Callable[[Tensor], Tensor]) -> Kernel:
    references = tuple(map(_behind_bias, activations))
    run, vjp = triton("bias_activation", name), triton("bias_activation", f"{name}_backward")
    return register_kernel(
        Kernel(name, references, "... d, d -> ... d", {"cuda": run}, {"cuda": vjp})
    )


bias_gelu = _kernel("bias_gelu", F.gelu, _gelu_written_out)
bias_gelu_tanh = _kernel("bias_gelu_tanh", _gelu_tanh, _gelu_tanh_written_out)
bias_relu = _kernel("bias_relu", F.relu)
bias_silu = _kernel("bias_silu", F.silu)
