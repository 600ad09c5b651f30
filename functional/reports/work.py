"""The work of a program: on one device, and on the busiest rank of a mesh."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.flops import flops
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import Work
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view

__all__ = ["bytes_touched", "work_of"]


def work_of(program: Program) -> Work:
    """The work of a program, over its mesh if it has one."""
    over_mesh = None if program.runtime is None else program.runtime.work(program)
    if over_mesh is not None:
        return over_mesh
    done, touched = sum(map(flops, program.calls)), sum(map(bytes_touched, program.calls))
    return Work(done, touched, done, touched)


def bytes_touched(node: fx.Node) -> int:
    """Bytes of an operation's operands and results; 0 for a view or an item of a tuple."""
    if node.op != "call_function" or node.target is operator.getitem or is_view(node):
        return 0
    values = [VAL.get(n) for n in node.all_input_nodes]
    return sum(map(_bytes, [*values, VAL.get(node)]))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, Iterable) else 0
