"""Kernels that torch selects by whether an operand requires grad, which none does while tracing.

Some of the kernels selected then have no derivative, or, worse, one of zeros. For derivatives the
function runs again, with operands that require grad, and torch selects the right kernels. Kernels of
attention on CUDA devices are the same ones, but leave out the log-sum-exp that their backward reads: they
always compute it here, which takes next to no time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.programs.graphs import Inserter, substitute
from torchard.functional.programs.tags import CUT, VAL

__all__ = ["keep_logsumexp", "may_follow", "without_gradient"]

# Kernels that are never differentiable.
_ALWAYS = frozenset(
    f"{name}.default"
    for name in (
        "_embedding_bag_forward_only",
        "_linear_cross_entropy_batch_chunked",
        "_linear_cross_entropy_batch_chunked_no_reduction",
    )
)
# Kernels selected where this argument does not require grad: they have no gradient for it.
_ARGUMENT = {"_scaled_dot_product_flash_attention_for_cpu.default": "attn_mask"}

# The argument that leaves out the log-sum-exp of attention where no operand requires grad.
_LOGSUMEXP = "compute_log_sumexp"

# Operations whose results do not depend on the values of operands.
_LIKE = frozenset(
    f"{name}.default"
    for name in (
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    )
)


def without_gradient(node: fx.Node) -> bool:
    """Whether torch may have selected this kernel because no operand requires grad."""
    name = getattr(node.target, "__name__", "")
    if name in _ALWAYS:
        return True
    operand = node.kwargs.get(_ARGUMENT.get(name, ""))
    return isinstance(operand, fx.Node) and may_follow(operand)


def may_follow(node: fx.Node) -> bool:
    """Whether a value may depend on a floating input through floating values only."""
    seen, stack = set[fx.Node](), [node]
    while stack:
        node = stack.pop()
        val = VAL.get(node)
        floats = not isinstance(val, torch.Tensor) or is_inexact(val)
        constant = getattr(node.target, "__name__", "") in _LIKE or CUT.on(node)
        if node in seen or not floats or constant:
            continue
        if node.op == "placeholder":
            return True
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return False


def keep_logsumexp(graph: fx.Graph) -> None:
    """Let kernels of attention compute the log-sum-exp that their backward reads."""
    for node in list(graph.nodes):
        at = _logsumexp_at(node.target) if isinstance(node.target, internals.OpOverload) else None
        if at is not None and len(node.args) > at and not node.args[at]:
            given = (*node.args[:at], True, *node.args[at + 1 :])
            whole = Inserter(node)(node.target, *given, **node.kwargs)
            for item in node.users:
                VAL.set(item, VAL.of(whole)[item.args[1]])
            substitute(node, whole)


@functools.cache
def _logsumexp_at(target: Any) -> int | None:
    """The position of the argument; None if the operator has none. Cached: traces ask of each node."""
    names = [argument.name for argument in internals.schema(target).arguments]
    return names.index(_LOGSUMEXP) if _LOGSUMEXP in names else None
