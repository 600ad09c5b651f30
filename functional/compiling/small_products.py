"""Small products in the body of a loop, as sums that a kernel computes together with what reads them.

torch's own kernel for a product of two matrices takes a microsecond before it begins. Iterations that run
in native code (`iterations/native_loop.py`) may take less than that for everything else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten

__all__ = ["sum_small_products"]

_MOST = 4096  # pairs of elements that are multiplied: more of them are faster in torch's own kernel
_DTYPES = (torch.float32, torch.float64)  # of others, Inductor rounds or sums otherwise


def sum_small_products(graph: fx.Graph) -> None:
    """Write small products on a CPU as sums of products of elements."""
    for node in list(graph.nodes):
        if node.target in (aten.mm.default, aten.bmm.default):
            factors = node.args
        elif node.target is aten.addmm.default and not node.kwargs and len(node.args) == 3:
            factors = node.args[1:]
        else:
            continue
        if not _is_small(node, factors):
            continue
        with graph.inserting_before(node):
            left, right = (
                _call(aten.unsqueeze.default, x, dim) for x, dim in zip(factors, (-1, -3), strict=True)
            )
            found = _call(aten.sum.dim_IntList, _call(aten.mul.Tensor, left, right), [-2])
            if node.target is aten.addmm.default:
                found = _call(aten.add.Tensor, found, node.args[0])
        inherit(found, node, "place")
        node.replace_all_uses_with(found)
        graph.erase_node(node)


def _is_small(node: fx.Node, factors: Any) -> bool:
    left, result = VAL.get(factors[0]), VAL.get(node)
    if left is None or result is None or left.device.type != "cpu" or left.dtype not in _DTYPES:
        return False
    return bool(0 < result.numel() * left.shape[-1] <= _MOST)


def _call(function: Any, x: fx.Node, *args: Any) -> fx.Node:
    """A call, with its value."""
    made = x.graph.call_function(function, (x, *args))
    values = [VAL.of(arg) if isinstance(arg, fx.Node) else arg for arg in (x, *args)]
    VAL.set(made, function(*values))
    return made
