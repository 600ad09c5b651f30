"""Gated activations, activation(gate) * up, of gated MLPs.

Source: Shazeer 2020, "GLU variants improve Transformer" (arXiv:2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.kernels.library.activations import gelu_tanh, gelu_tanh_written_out, gelu_written_out
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["geglu", "geglu_tanh", "swiglu"]


def _gate(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return activation(gate) * up

    return gated


def _silu_written_out(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _kernel(name: str, *activations: Callable[[Tensor], Tensor]) -> Kernel:
    """The kernel of activation(gate [...]) * up [...], in all spellings of an activation."""
    return register_kernel(Kernel(name, tuple(map(_gate, activations)), "..., ... -> ..."))


swiglu = _kernel("swiglu", F.silu, _silu_written_out)
geglu = _kernel("geglu", F.gelu, gelu_written_out)
geglu_tanh = _kernel("geglu_tanh", gelu_tanh, gelu_tanh_written_out)
