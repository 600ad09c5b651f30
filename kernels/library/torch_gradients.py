"""Operations whose gradient is one operator of torch's, which torch.func writes out.

torch.func differentiates so that the gradient can be differentiated again, by formulas of many operations
where torch's own operator has no derivative. A program that is run needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchard.functional.torch_internals.operators import aten
from torchard.kernels.patterns.kernel import Kernel, register_kernel

__all__ = ["group_norm", "mish", "silu"]


def _pointwise(name: str, run: Callable[[Tensor], Tensor], gradient: Any) -> Kernel:
    def vjp(x: Tensor, cotangent: Tensor) -> Tensor:
        result: Tensor = gradient(cotangent, x)
        return result

    return register_kernel(
        Kernel(name, (run,), "... -> ...", {"any": run}, {"any": vjp}, gradient_only=True)
    )


def _silu(x: Tensor) -> Tensor:
    return F.silu(x)


def _mish(x: Tensor) -> Tensor:
    return F.mish(x)


silu = _pointwise("silu", _silu, aten.silu_backward.default)
mish = _pointwise("mish", _mish, aten.mish_backward.default)


def _group_norm(x: Tensor, w: Tensor, b: Tensor, eps: Any = ...) -> tuple[Tensor, Tensor, Tensor]:
    """GroupNorm of x [n, groups, channels, elements], and the statistics that its gradient reads.

    The weight and bias are [1, groups, channels, 1], as torch's formulas view them.
    """
    n, groups, channels, elements = x.shape
    flat = x.reshape(n, groups * channels, elements).contiguous()
    y, mean, rstd = torch.native_group_norm(
        flat, w.reshape(-1), b.reshape(-1), n, groups * channels, elements, groups, eps
    )
    return y.view(x.shape), mean.detach(), rstd.detach()


def _group_norm_vjp(
    x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, cotangent: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    n, groups, channels, elements = x.shape
    shape = n, groups * channels, elements
    # It reads memory in the order of the dims, whatever the strides are (torch 2.13).
    x_rows, cotangent_rows = x.reshape(shape).contiguous(), cotangent.reshape(shape).contiguous()
    to_x, to_w, to_b = aten.native_group_norm_backward.default(
        cotangent_rows, x_rows, mean, rstd, w.reshape(-1).contiguous(), *shape, groups, [True] * 3
    )
    return to_x.view(x.shape), to_w.view(w.shape), to_b.view(w.shape)


group_norm = register_kernel(
    Kernel(
        "group_norm",
        (_group_norm,),
        "n g c s, 1 g c 1, 1 g c 1 -> n g c s, n g, n g | whole c s",
        {"any": _group_norm},
        {"any": _group_norm_vjp},
        gradient_only=True,
    )
)
