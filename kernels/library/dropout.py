"""The end of a block in training: a bias, dropout by a key, the residual sum, and the next norm.

The backward recomputes the mask from the key, so that nothing of its size is kept.

Source: Srivastava et al. 2014 (JMLR 15); Megatron-LM (arXiv:1909.08053) for the combination.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from torchard.functional import random
from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["bias_dropout_residual", "bias_dropout_residual_layer_norm", "dropout_residual"]

# The digits of a probability that its threshold of 32 bits determines.
_DIGITS = 9


def _dropped(x: Tensor, key: Tensor, threshold: Any) -> Tensor:
    """Dropout as by `torchard.random.bernoulli`: words below p * 2^32 drop an element."""
    p: float = round(threshold / 2**32, _DIGITS)
    return (x * (1 / (1 - p))).masked_fill(random.bits(key, x.shape) < threshold, 0)


def _dropout_residual(x: Tensor, residual: Tensor, key: Tensor, threshold: Any = ...) -> Tensor:
    return residual + _dropped(x, key, threshold)


def _bias_dropout_residual(
    x: Tensor, b: Tensor, residual: Tensor, key: Tensor, threshold: Any = ...
) -> Tensor:
    return residual + _dropped(x + b, key, threshold)


def _bias_dropout_residual_layer_norm(
    x: Tensor,
    b: Tensor,
    residual: Tensor,
    key: Tensor,
    weight: Tensor,
    bias: Tensor,
    threshold: Any = ...,
    eps: Any = ...,
) -> tuple[Tensor, Tensor]:
    h = residual + _dropped(x + b, key, threshold)
    return h, F.layer_norm(h, h.shape[-1:], weight, bias, eps)


# The mask depends on an element's index in the global array, so no dim may be split.
dropout_residual = register_kernel(
    Kernel(
        "dropout_residual",
        (_dropout_residual,),
        "... d, ... d, 2:int64 -> ... d | whole ... d",
    )
)
bias_dropout_residual = register_kernel(
    Kernel(
        "bias_dropout_residual",
        (_bias_dropout_residual,),
        "... d, d, ... d, 2:int64 -> ... d | whole ... d",
        {"cuda": triton("dropout", "bias_dropout_residual")},
        {"cuda": triton("dropout", "bias_dropout_residual_backward")},
    )
)
bias_dropout_residual_layer_norm = register_kernel(
    Kernel(
        "bias_dropout_residual_layer_norm",
        (_bias_dropout_residual_layer_norm,),
        "... d, d, ... d, 2:int64, d, d -> ... d, ... d | whole ... d",
        {"cuda": triton("norms", "bias_dropout_residual_layer_norm")},
        {"cuda": triton("norms_backward", "bias_dropout_residual_layer_norm_backward")},
    )
)
