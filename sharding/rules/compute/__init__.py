"""Factor rules of operations that compute new values, one file per family."""

from torchard.sharding.rules.compute import (
    attention,
    attention_on_cuda,
    batch_norm,
    conv,
    creation,
    fourier,
    image,
    linalg,
    loss,
    matmul,
    normalization,
    pointwise,
    reduce,
    scan,
    search,
)

__all__ = [
    "attention",
    "attention_on_cuda",
    "batch_norm",
    "conv",
    "creation",
    "fourier",
    "image",
    "linalg",
    "loss",
    "matmul",
    "normalization",
    "pointwise",
    "reduce",
    "scan",
    "search",
]
