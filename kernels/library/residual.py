"""The sum of a residual stream and a block's output, and the norm of that sum; both are results.

Source: Ba et al. 2016 (arXiv:1607.06450); Zhang and Sennrich 2019 (arXiv:1910.07467).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchard.kernels.execution.optional_backends import triton
from torchard.kernels.library.norms import layer_norm, rms_norm
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["add_layer_norm", "add_rms_norm"]

Norm = Callable[..., Tensor]


def _weighted(norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    def added(x: Tensor, y: Tensor, w: Tensor, eps: Any = ...) -> tuple[Tensor, Tensor]:
        h = x + y
        return h, norm(h, w, eps)

    return added


def _biased(norm: Norm) -> Callable[..., tuple[Tensor, Tensor]]:
    def added(x: Tensor, y: Tensor, w: Tensor, b: Tensor, eps: Any = ...) -> tuple[Tensor, Tensor]:
        h = x + y
        return h, norm(h, w, b, eps)

    return added


def _functions(kernel: Kernel) -> list[Norm]:
    return [pattern.fn for pattern in kernel.patterns]


add_rms_norm = register_kernel(
    Kernel(
        "add_rms_norm",
        tuple(map(_weighted, _functions(rms_norm))),
        "... d, ... d, d -> ... d, ... d | whole d",
        {"cuda": triton("norms", "add_rms_norm")},
        {"cuda": triton("norms_backward", "add_rms_norm_backward")},
    )
)
add_layer_norm = register_kernel(
    Kernel(
        "add_layer_norm",
        tuple(map(_biased, _functions(layer_norm))),
        "... d, ... d, d, d -> ... d, ... d | whole d",
        {"cuda": triton("norms", "add_layer_norm")},
        {"cuda": triton("norms_backward", "add_layer_norm_backward")},
    )
)
