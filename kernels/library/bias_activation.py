"""A bias followed by an activation, as after the first linear layer of an MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.library.activations import gelu_tanh, gelu_tanh_written_out, gelu_written_out
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["bias_gelu", "bias_gelu_tanh", "bias_relu", "bias_silu"]


def _biased(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def biased(x: Tensor, b: Tensor) -> Tensor:
        return activation(x + b)

    return biased


def _kernel(name: str, *activations: Callable[[Tensor], Tensor]) -> Kernel:
    references = tuple(map(_biased, activations))
    run, vjp = triton("bias_activation", name), triton("bias_activation", f"{name}_backward")
    return register_kernel(
        Kernel(name, references, "... d, d -> ... d", {"cuda": run}, {"cuda": vjp})
    )


bias_gelu = _kernel("bias_gelu", F.gelu, gelu_written_out)
bias_gelu_tanh = _kernel("bias_gelu_tanh", gelu_tanh, gelu_tanh_written_out)
bias_relu = _kernel("bias_relu", F.relu)
bias_silu = _kernel("bias_silu", F.silu)
