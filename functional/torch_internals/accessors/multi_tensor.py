"""Kernels that update many parameters at once, in place; `torch.optim` calls them as ``fused=True``.

They read and write memory element by element, whatever the strides are, and do not change gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchard.functional.torch_internals.accessors.required import require

__all__ = ["fused_adamw", "fused_sgd"]

require(torch, "_fused_adamw_", "_fused_sgd_")
_ADAMW: Any = torch._fused_adamw_
_SGD: Any = torch._fused_sgd_

Tensors = Sequence[Tensor]


def fused_adamw(
    params: Tensors,
    means: Tensors,
    squares: Tensors,
    grads: Tensors,
    steps: Tensors,
    rate: Any,
    numbers: Mapping[str, float],
) -> None:
    """AdamW of dense tensors of one dtype and device; ``steps`` are counts in float32."""
    _ADAMW(
        params,
        grads,
        means,
        squares,
        [],
        steps,
        lr=_rate(rate, params[0]),
        amsgrad=False,
        maximize=False,
        **numbers,
    )


def fused_sgd(
    params: Tensors, velocities: Tensors, grads: Tensors, rate: Any, numbers: Mapping[str, Any]
) -> None:
    """SGD with momentum, of dense tensors of one dtype and device."""
    _SGD(
        params,
        grads,
        velocities,
        lr=_rate(rate, params[0]),
        dampening=0.0,
        maximize=False,
        is_first_step=False,
        **numbers,
    )


def _rate(rate: Any, like: Tensor) -> Any:
    """A learning rate as the kernels read it: CUDA's have float32 in the memory of the device."""
    if not isinstance(rate, Tensor):
        return float(rate)
    return rate if like.device.type == "cpu" else rate.to(like.device, torch.float32)
