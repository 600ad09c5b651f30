"""Kernels that torch picks by whether a gradient is asked for; while tracing, none is.

Some of those have no derivative, or (worse) one of zeros: for derivatives the function runs again, with
gradients asked for, and torch picks what it would have picked.
"""

from __future__ import annotations

import torch
from torch import fx

from torchard.functional.programs.tags import CUT, VAL

__all__ = ["may_follow", "without_gradient"]

# Never differentiable as picked.
_ALWAYS = frozenset(
    f"{name}.default"
    for name in (
        "_embedding_bag_forward_only",
        "_linear_cross_entropy_batch_chunked",
        "_linear_cross_entropy_batch_chunked_no_reduction",
    )
)
# Picked where this argument asks for no gradient: it has none here.
_ARGUMENT = {"_scaled_dot_product_flash_attention_for_cpu.default": "attn_mask"}

# Values that depend on no operand's value.
_LIKE = frozenset(
    f"{name}.default"
    for name in (
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    )
)


def without_gradient(node: fx.Node) -> bool:
    """Whether torch may have picked this operation for want of a gradient."""
    name = getattr(node.target, "__name__", "")
    if name in _ALWAYS:
        return True
    operand = node.kwargs.get(_ARGUMENT.get(name, ""))
    return isinstance(operand, fx.Node) and may_follow(operand)


def may_follow(node: fx.Node) -> bool:
    """Whether a gradient could be asked for: some floating input leads here by way of floats."""
    seen, stack = set[fx.Node](), [node]
    while stack:
        node = stack.pop()
        val = VAL.get(node)
        floats = not isinstance(val, torch.Tensor) or val.is_floating_point() or val.is_complex()
        constant = getattr(node.target, "__name__", "") in _LIKE or CUT.on(node)
        if node in seen or not floats or constant:
            continue
        if node.op == "placeholder":
            return True
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return False
