"""The kernels that come with torchard, one file per family."""

from torchard.kernels.library import (
    attention,
    attention_capped,
    bias_activation,
    cross_entropy,
    dropout,
    gated,
    linear_cross_entropy,
    norms,
    projections,
    residual,
    rope,
    softmax,
    torch_gradients,
)

__all__ = [
    "attention",
    "attention_capped",
    "bias_activation",
    "cross_entropy",
    "dropout",
    "gated",
    "linear_cross_entropy",
    "norms",
    "projections",
    "residual",
    "rope",
    "softmax",
    "torch_gradients",
]
