"""The work of a program: on one device, and on the busiest rank of a mesh."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.flops import flops, op_name
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import Work
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view
from torchard.functional.remat.liveness import writes_of

__all__ = ["bytes_touched", "work_of"]


def work_of(program: Program) -> Work:
    """The work of a program, over its mesh if it has one."""
    over_mesh = None if program.runtime is None else program.runtime.work(program)
    if over_mesh is not None:
        return over_mesh
    writes = writes_of(program)
    done = sum(map(flops, program.calls))
    touched = sum(bytes_touched(node, writes.get(node)) for node in program.calls)
    return Work(done, touched, done, touched)


def bytes_touched(node: fx.Node, written: bool | None = None) -> int:
    """Bytes of an operation's operands and results; 0 for a view or an item of a tuple.

    Args:
        written: for a write to the first operand, whether its value already lies there: if not, the
            other operands are read, and as many elements are written as they say.
    """
    if written or node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return 0
    values = [VAL.get(n) for n in node.all_input_nodes]
    if written is None:
        return sum(map(_bytes, [*values, VAL.get(node)]))
    base: torch.Tensor = VAL.of(node)
    return sum(map(_bytes, values[1:])) + _elements_written(node) * base.element_size()


def _elements_written(node: fx.Node) -> int:
    """How many elements a write in place changes at most."""
    args: Any = fx.map_arg(node.args, VAL.of)
    base: torch.Tensor = args[0]
    others = args[1:]
    name = op_name(node)
    if name in ("aten.index_put", "aten._unsafe_index_put"):
        return _indexed(base, others[0])
    if name in ("aten.index_copy", "aten.index_add", "aten.index_reduce", "aten.index_fill"):
        dim, index, *_ = others
        return int(index.numel()) * (base.numel() // max(base.shape[dim] if base.ndim else 1, 1))
    if name.startswith("aten.scatter"):
        return int(others[1].numel())
    if name.startswith("aten.masked") or name == "aten.copy":
        return base.numel()
    return int(others[0].numel())  # of the value of a part, or the index of put


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
