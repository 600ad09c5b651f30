"""Peephole optimisations of a local graph: views of views become one, collectives run in place where
possible, and kernels get the strides they require.

All rewrites are exact. Each redundant view that autograd and reshapes of sub-dims leave behind
(``t(t(x))``) costs a microsecond, as much as a small layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional.programs.markers import again, goes_on
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import LOOP, SHAPE, STAGE
from torchard.functional.torch_internals.operators import aten, c10d

__all__ = ["dense_rows", "fold_views", "reduce_in_place"]


def fold_views(graph: fx.Graph) -> None:
    """Drop reshapes of reshapes, double transposes, and reshapes to the same shape, where it is known."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        if node.target is aten.reshape.default:
            _fold_reshape(node, source)
        elif node.target is aten.t.default and source.target is aten.t.default:
            node.replace_all_uses_with(source.all_input_nodes[0])
    graph.eliminate_dead_code(is_impure_node=_must_stay)


def _must_stay(node: fx.Node) -> bool:
    """Whether a node must be kept whose result is unused here: other ranks or iterations wait for it."""
    return node.op in ("placeholder", "output") or STAGE.on(node) or node.target in (again, goes_on)


def _fold_reshape(node: fx.Node, source: fx.Node) -> None:
    while source.target is aten.reshape.default:
        (source,) = source.all_input_nodes
        node.update_arg(0, source)
    shape = node.args[1]
    SHAPE.set(node, tuple(shape))  # type: ignore[arg-type]
    if SHAPE.get(source) == tuple(shape):  # type: ignore[arg-type]
        node.replace_all_uses_with(source)


# Operations whose result is contiguous and aliases no other tensor.
_FRESH: frozenset[Any] = frozenset(
    {aten.mm.default, aten.bmm.default, aten.sum.dim_IntList, aten.sum.default, aten.addmm.default}
)


def reduce_in_place(graph: fx.Graph) -> None:
    """Run an all_reduce in place where nothing else reads its operand."""
    for node in list(graph.nodes):
        if node.target is not c10d.all_reduce.default:
            continue
        source = node.args[0]
        if LOOP.get(source) is not LOOP.get(node):  # each iteration reads the operand
            continue
        if source.target is aten.cat.default and len(source.users) == 1:  # a bucket
            node.target = c10d.all_reduce_.default
        elif source.target is aten.contiguous.default:
            inner = source.args[0]
            alone = len(source.users) == len(inner.users) == 1
            if alone and inner.target in _FRESH and LOOP.get(inner) is LOOP.get(node):
                node.update_arg(0, inner)
                graph.erase_node(source)
                node.target = c10d.all_reduce_.default


# Kernels that assume a last stride of 1, which torch checks before it picks one of them.
_READ_ROWS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def dense_rows(graph: fx.Graph) -> None:
    """Copy operands whose rows are not dense, for kernels that require it.

    Torch picked the kernel for the strides of the traced values; the strides of a shard that was
    gathered or placed may differ.
    """
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name.startswith(_READ_ROWS):
            with graph.inserting_before(node):
                dense = {x: graph.call_function(_dense, (x,)) for x in node.all_input_nodes}
            for x, copy in dense.items():
                inherit(copy, node)
                node.replace_input_with(x, copy)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous() if x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1 else x
