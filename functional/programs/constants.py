"""Creation and filling that no longer depend on a tensor that only lends its shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from torchard.functional.programs.graphs import Inserter, substitute
from torchard.functional.programs.tags import STEP, VAL
from torchard.functional.torch_internals.operators import aten

__all__ = ["fill_with", "is_one", "is_zero", "release_constants"]

_CONSTANTS: dict[Any, float | int | None] = {
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    aten.empty_like.default: 0,
    aten.new_empty.default: 0,
    aten.full_like.default: None,
    aten.new_full.default: None,
    aten.fill.Scalar: None,
    aten.zero.default: 0,
}


# Operations that fill with a tensor's value: only the shape of the filled tensor is needed.
_COPIES = (aten.fill.Tensor, aten.copy.default)
_SAME = (aten._to_copy.default, aten.clone.default, aten.expand.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_ONES = (aten.ones.default, aten.ones_like.default, aten.new_ones.default)


def release_constants(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Write those nodes that are constants without the tensors whose shape they take.

    Returns:
        The nodes, with those that took the places of constants.
    """
    released = []
    for node in list(nodes):
        if node.op == "call_function" and node.target in _CONSTANTS:
            node = fill_with(node, _value(node))
        elif node.target in _COPIES:
            node = _spread(node)
        released.append(node)
    return released


def _value(node: fx.Node) -> Any:
    """The value that a constant is filled with."""
    known = _CONSTANTS[node.target]
    return known if known is not None else node.args[2 if node.target is aten.new_full.default else 1]


def fill_with(node: fx.Node, value: Any) -> fx.Node:
    """Rewrite ``zeros_like(x)`` as ``full``, since the shape and dtype of x are known."""
    val = VAL.of(node)
    kind = {"dtype": val.dtype, "device": val.device}
    full = Inserter(node)(aten.full.default, list(val.shape), value, same="value", **kind)
    substitute(node, full)
    return full


def is_zero(node: fx.Node) -> bool:
    """Whether a value is zero everywhere by how it is created, wherever ranks hold it."""
    return _is_filled(node, 0, _ZEROS)


def is_one(node: fx.Node) -> bool:
    """Whether a value is one everywhere by how it is created."""
    return _is_filled(node, 1, _ONES)


def _is_filled(node: fx.Node, value: int, made: tuple[Any, ...]) -> bool:
    while node.target in _SAME or STEP.on(node):
        node = node.all_input_nodes[0]
    if node.target is aten.full.default:
        return isinstance(node.args[1], (int, float)) and node.args[1] == value
    return node.target in made


def _spread(node: fx.Node) -> fx.Node:
    """Rewrite ``fill(x, value)`` as the value, expanded to the shape and dtype of x."""
    val, value, insert = VAL.of(node), node.args[1], Inserter(node)
    assert isinstance(value, fx.Node)
    if VAL.of(value).dtype != val.dtype:
        value = insert(aten._to_copy.default, value, dtype=val.dtype)
    expanded = insert(aten.expand.default, value, list(val.shape))
    substitute(node, expanded)
    return expanded
