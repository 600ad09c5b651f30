"""FLOPs of a node: by torch's counter where it has a formula, else one per element."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from torchard.functional.programs.loops import is_apart, times
from torchard.functional.programs.markers import is_marker, listed, rows, total
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view

__all__ = ["DOTS", "flops", "flops_of", "is_product", "op_name"]

# torch's counter has no formulas for attention on CPUs, for products with vectors and into running sums.
_FORMULAS: dict[str, Any] = {
    **{str(packet): formula for packet, formula in flop_registry.items()},
    "aten.mv": lambda a, x, **_: 2 * a.numel(),
    "aten.addmv": lambda b, a, x, **_: 2 * a.numel(),
    "aten.dot": lambda x, y, **_: 2 * x.numel(),
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, out_val=None, **__: sdpa_flop(
        q.shape, _of_heads(q, k), _of_heads(q, v), out_val=out_val
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda grad, q, k, v, *_, out_val=None, **__: sdpa_backward_flop(
            grad.shape, q.shape, _of_heads(q, k), _of_heads(q, v), out_val=out_val
        )
    ),
    # Of a rank with some of the groups, as if all had as many rows.
    "torchard.grouped_mm": lambda x, w, begins, ends, groups, **_: (
        2 * x.shape[-2] * w.numel() // groups
    ),
    "torchard.grouped_outer": lambda x, y, begins, ends, groups, out_val=None, **_: (
        2 * x.shape[-2] * out_val.numel() // groups
    ),
}

_FORMULAS["aten.addmm_"] = _FORMULAS["aten.addmm"]


def _of_heads(query: torch.Tensor, x: torch.Tensor) -> tuple[int, ...]:
    """The shape of keys or values with as many heads as the queries, which may share them."""
    return (x.shape[0], query.shape[1], *x.shape[2:])


# The operations whose floating point operations torch counts: products, convolutions, attention.
DOTS = frozenset(_FORMULAS)


def op_name(node: fx.Node) -> str:
    """The name of the operation that computes a node's value, without its overload: ``"aten.mm"``.

    Args:
        node: a node of a program; an item of a tuple has the name of what made the tuple.

    Returns:
        The name.

    >>> import torch, torchard as ta
    >>> from torchard.transforms import op_name
    >>> [op_name(node) for node in ta.trace(lambda x: x.sort().values.sin())(torch.ones(3)).calls]
    ['aten.sort', 'aten.sort', 'aten.sin']
    """
    while node.target is operator.getitem:
        node = node.all_input_nodes[0]
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) if packet is not None else str(getattr(node.target, "__name__", node.target))


def is_product(node: fx.Node) -> bool:
    """Whether torch counts the multiplications of an operation."""
    return node.target is not operator.getitem and op_name(node) in DOTS


def flops(node: fx.Node) -> int:
    """FLOPs of one iteration's call: two per multiplication of a product, one per element of all else.

    Views and items of tuples cost nothing.
    """
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return 0
    if is_marker(node):
        return 0
    formula = _FORMULAS.get(op_name(node))
    if formula is not None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), VAL.of)
        return int(formula(*args, **kwargs, out_val=VAL.of(node)))
    operands = [VAL.get(n) for n in node.all_input_nodes]
    return max(map(_elements, [*operands, VAL.get(node)]), default=0)


def flops_of(node: fx.Node) -> int:
    """FLOPs of an operation in all iterations."""
    if node.target is total:
        return (sum(map(times, node.all_input_nodes)) - 1) * _elements(VAL.get(node))
    if node.target in (rows, listed) and not is_apart(node):
        return _elements(VAL.get(node))
    return times(node) * flops(node)


def _elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(_elements, value)) if isinstance(value, Iterable) else 0
