"""Gradients that a traced function takes inside, and the trace's input to which each belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.program import Program
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.trace_state import TraceState

__all__ = ["note", "note_replayed", "primals_of"]

_SAME = (aten.alias.default, aten.detach.default, aten._to_copy.default)


def note(state: TraceState, primals: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Record the input of each gradient that is with respect to an input of the trace."""
    for primal, gradient in zip(primals, gradients, strict=True):
        if gradient is not None:
            _pair(state, primal, gradient)


def _pair(state: TraceState, primal: torch.Tensor, gradient: torch.Tensor) -> None:
    if internals.batch_dims(primal) != internals.batch_dims(gradient):
        return
    of, node = _node(state, primal), _node(state, gradient)
    if of is not None and of.op == "placeholder" and node is not None:
        state.gradients[node] = of


def note_replayed(
    state: TraceState, program: Program, operands: Sequence[Any], values: Sequence[Any]
) -> None:
    """Like `note`, for gradients among the outputs of a program that was replayed in this trace.

    An output that is a gradient taken inside records its input's position. An output of role ``gradient``
    may belong to a backward half, which has the input only as a residual, under the input's path.
    """
    by_path = {leaf.path: operand for leaf, operand in zip(program.inputs, operands, strict=False)}
    for leaf, value in zip(program.outputs, values, strict=True):
        operand = None
        if leaf.role == "gradient":
            operand = by_path.get(leaf.path.removeprefix("gradient of "))
        elif leaf.role == "output" and leaf.of is not None:
            operand = operands[leaf.of]
        if operand is not None:
            _pair(state, operand, value)


def primals_of(state: TraceState, outputs: Sequence[fx.Node]) -> list[fx.Node | None]:
    """For each output that is a gradient, the input to which it belongs; None for other outputs."""
    return [state.gradients.get(_same(output)) for output in outputs]


def _node(state: TraceState, tensor: torch.Tensor) -> fx.Node | None:
    node = internals.proxy_node(state.tracer, internals.base_tensor(tensor))
    return None if node is None else _same(node)


def _same(node: fx.Node) -> fx.Node:
    """The node behind aliases, detaches and dtype conversions."""
    while node.target in _SAME:
        node = node.all_input_nodes[0]
    return node
