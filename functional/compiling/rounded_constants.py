"""Passes that round numbers and constants as eager torch does, before Inductor lowers a graph.

Observed on torch 2.13. `round_numbers`: eager torch, on a CPU alone, rounds the number of ``x + 0.1`` to
the half precision of x, and what `full` makes; Inductor's kernels compute with all digits.

`fold_conversions`: nor do they round a constant that is converted to a narrower float. Inductor's own
folding would, but it also takes ``x * 0`` for 0 (`torch_internals/compilers.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten, prims

__all__ = ["fold_conversions", "round_numbers"]

# For these eager torch rounds numbers, and tensors without dims, to the dtype of the other operand. For
# `mul` and `div` it does not.
_ROUNDED = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar),
    *(aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.pow.Tensor_Tensor),
    *(aten.remainder.Scalar, aten.remainder.Scalar_Tensor, aten.remainder.Tensor),
    *(aten.fmod.Scalar, aten.fmod.Tensor),
    *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
    *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor),
}
# These make values of a number.
_FILLED = {
    *(aten.full.default, aten.full_like.default, aten.new_full.default, aten.fill.Scalar),
    aten.scalar_tensor.default,
}
_CONVERSIONS = {prims.convert_element_type.default, aten._to_copy.default}
# These move or repeat elements.
_SHAPED = {
    *(aten.expand.default, aten.view.default, aten.reshape.default, aten.permute.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default),
}


# -- numbers ------------------------------------------------------------------------------------------


def round_numbers(graph: fx.Graph) -> None:
    """Round what eager torch rounds to half precision before it computes."""
    for node in list(graph.nodes):
        dtype = _rounds_to(node)
        if dtype in (torch.bfloat16, torch.float16):
            with graph.inserting_before(node):
                node.args = tuple(_rounded(x, dtype) for x in node.args)
                node.kwargs = {key: _rounded(x, dtype) for key, x in node.kwargs.items()}


def _rounds_to(node: fx.Node) -> torch.dtype | None:
    """The dtype to which an operation rounds numbers."""
    values: list[torch.Tensor] = []
    if node.target in _FILLED:
        values = [VAL.of(node)]
    elif node.target in _ROUNDED:
        values = [x for x in map(VAL.of, node.all_input_nodes) if x.dim()]
    dtypes = {x.dtype for x in values if x.device.type == "cpu"}
    return dtypes.pop() if len(dtypes) == 1 else None


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """A number, or a node without dims, in a dtype; any other argument as it is."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=dtype).item()
    if not isinstance(value, fx.Node) or VAL.of(value).dim() or not _is_wider(value, dtype):
        return value
    rounded = value.graph.call_function(prims.convert_element_type.default, (value, dtype))
    VAL.set(rounded, VAL.of(value).to(dtype))
    return rounded


def _is_wider(node: fx.Node, dtype: torch.dtype) -> bool:
    have: torch.Tensor = VAL.of(node)
    return have.is_floating_point() and have.dtype != dtype


# -- constants ----------------------------------------------------------------------------------------


def fold_conversions(graph: fx.Graph) -> None:
    """Make constants of conversions of constants."""
    constants: dict[fx.Node, torch.Tensor] = {}  # of one element, which all elements of the value are
    for node in list(graph.nodes):
        element = _element(node, constants)
        if element is None:
            continue
        constants[node] = element
        if node.target in _CONVERSIONS and element.is_floating_point():
            constants[_filled(node, element)] = element


def _filled(node: fx.Node, element: torch.Tensor) -> fx.Node:
    """A value of this element alone, in place of a node."""
    like: torch.Tensor = VAL.of(node)
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    with node.graph.inserting_before(node):
        args = (list(like.shape), element.item())
        filled = node.graph.call_function(aten.full.default, args, options)
    VAL.set(filled, like)
    node.replace_all_uses_with(filled)
    return filled


def _element(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The one element that a value has, if it is a constant: of no dims if the value has none."""
    value = VAL.get(node)
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return None
    if not all(isinstance(size, int) for size in value.shape) or value.device.type != "cpu":
        return None
    one = [1] * bool(value.dim())
    if node.target is aten.full.default and isinstance(node.args[1], (int, float)):
        return torch.full(one, node.args[1], dtype=value.dtype)
    operands = node.all_input_nodes
    if not operands or any(operand not in constants for operand in operands):
        return None
    if node.target in _SHAPED:
        return constants[operands[0]].reshape(one)
    found = _computed(node, constants)
    return found if isinstance(found, torch.Tensor) and found.dtype == value.dtype else None


def _computed(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> Any:
    """The result of a pointwise operation on the elements of its operands."""
    op: Any = node.target
    pointwise = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    if not pointwise and op not in _CONVERSIONS:
        return None
    given: Any = fx.map_arg((node.args, node.kwargs), constants.__getitem__)
    args, kwargs = given
    return op(*args, **kwargs)
