"""Derivatives of operators of our own, under any transforms of torch.func.

``torch.library.register_autograd`` does not support them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.autograd_function import (  # type: ignore[attr-defined]
    enable_single_level_autograd_function,
)
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

from torchard.functional.torch_internals.accessors.required import require

__all__ = ["bilinear"]

require(torch._C, "_AutoDispatchBelowAutograd")


def bilinear(op: Any, backward: Callable[..., Sequence[Any]]) -> Callable[..., torch.Tensor]:
    """The kernel for autograd of an operator that is linear in each of its first two operands.

    Args:
        op: takes two tensors, then tensors without derivative (or None), and last a number.
        backward: takes the result's gradient, the operands, and (``needed``) whether each of the first
            two needs a gradient; it returns both gradients, or None.

    Returns:
        A function of the operands. It records one level; operators that are called below record others.
    """

    class Product(_SingleLevelFunction):
        @staticmethod
        def forward(*operands: Any) -> Any:
            # Torch switches both off in here, but levels below record too.
            with torch.enable_grad(), _set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
                return op(*operands)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            *operands, ctx.number = inputs
            ctx.save_for_backward(*operands)
            ctx.save_for_forward(*operands)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            operands, needed = (*ctx.saved_tensors, ctx.number), ctx.needs_input_grad
            gradients = backward(grad, *operands, needed=needed[:2])
            return *gradients, *[None] * (len(needed) - 2)

        @staticmethod
        def jvp(ctx: Any, to_x: Any, to_y: Any, *_: Any) -> Any:
            x, y, *others = ctx.saved_tensors
            terms = [] if to_x is None else [op(to_x, y, *others, ctx.number)]
            terms += [] if to_y is None else [op(x, to_y, *others, ctx.number)]
            return sum(terms[1:], terms[0])

    def run(*operands: Any) -> Any:
        with enable_single_level_autograd_function():
            return Product.apply(*operands)  # type: ignore[attr-defined]

    return run
