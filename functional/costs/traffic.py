"""Traffic: the bytes of memory that an operation reads and writes, in all iterations."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.costs.flops import op_name
from torchard.functional.effects.in_place import SCATTERS, is_pointwise
from torchard.functional.programs.loops import is_apart, times
from torchard.functional.programs.markers import is_marker, listed, rows, total
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view

__all__ = ["bytes_touched"]


def bytes_touched(node: fx.Node, written: bool | None = None) -> int:
    """Bytes of an operation's operands and results, in all iterations; 0 for views and items of tuples.

    Args:
        written: for a write to the first operand, whether its value already lies there: if not, the
            other operands are read, and as many elements are written as they say.
    """
    if written or node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return 0
    if is_marker(node):
        return _collected(node)
    values = [VAL.get(n) for n in node.all_input_nodes]
    if written is None or (is_pointwise(node.target) and node.target not in SCATTERS):
        return times(node) * sum(map(_bytes, [*values, VAL.get(node)]))
    base: torch.Tensor = VAL.of(node)
    changed = _elements_written(node) * base.element_size()
    return times(node) * (sum(map(_bytes, values[1:])) + changed)


def _collected(node: fx.Node) -> int:
    """The bytes read and written by what stacks or adds up the values of iterations."""
    size = _bytes(VAL.get(node))
    if node.target is total:
        return 3 * size * (sum(map(times, node.all_input_nodes)) - 1)
    return 2 * size if node.target in (rows, listed) and not is_apart(node) else 0


def _elements_written(node: fx.Node) -> int:
    """How many elements a write in place changes at most."""
    args: Any = fx.map_arg(node.args, VAL.of)
    base: torch.Tensor = args[0]
    others = args[1:]
    name = op_name(node)
    if name in ("aten.index_put", "aten._unsafe_index_put"):
        return _indexed(base, others[0])
    if name == "aten.slice_scatter":
        at: list[Any] = [*others[1:], *(0, None, None, 1)[len(others) - 1 :]]
        length = base.shape[at[0]]
        return int(base.numel() // max(length, 1) * len(range(length)[slice(*at[1:])]))
    if name in ("aten.index_copy", "aten.index_add", "aten.index_reduce", "aten.index_fill"):
        dim, index, *_ = others
        return int(index.numel()) * (base.numel() // max(base.shape[dim] if base.ndim else 1, 1))
    if name.startswith("aten.scatter"):
        return int(others[1].numel())
    if name.startswith("aten.masked") or name == "aten.copy":
        return base.numel()
    return int(others[0].numel())  # of a row's or a diagonal's value, or the index of put


def _indexed(base: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> int:
    """The number of elements that indices of a tensor select; of a mask, at most."""
    picked, dims = 1, 0
    rest = base.numel()
    for index in indices:
        covered = 1 if index is None or index.dtype not in (torch.bool, torch.uint8) else index.ndim
        if index is not None:
            picked = max(picked, index.numel())
            rest //= max(math.prod(base.shape[dims : dims + covered]), 1)
        dims += covered
    return picked * rest


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, Iterable) else 0
