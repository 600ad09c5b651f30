"""Rewrites ``as_strided`` and ``as_strided_scatter`` as views that can be split over ranks.

Memory cannot be split over ranks; rows, slices and diagonals can. A region of a dense tensor's memory is
read by the same views that replace writes through ``as_strided`` (`functional.effects.scatters`).
Regions of other tensors are not rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.effects.scatters import (
    NodeInserter,
    ViewStep,
    strided_steps,
    written_back,
)
from torchard.functional.programs.graphs import substitute
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_dense
from torchard.functional.torch_internals.operators import aten

__all__ = ["unstride"]


def unstride(graph: fx.Graph) -> None:
    """Replace every strided node whose operand is dense. The graph is changed in place."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        if steps := _steps(node, node.args[1:]):
            substitute(node, _views(node, steps)[-1])
    for node in graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default):
        if steps := _steps(node, node.args[2:]):
            substitute(node, _scattered(node, steps))


def _steps(node: fx.Node, where: Sequence[Any]) -> list[ViewStep]:
    """The views from a node's operand to a region of memory; none unless the operand fills its memory."""
    base: torch.Tensor = VAL.of(node.all_input_nodes[0])
    if not base.numel() or base.storage_offset() or not is_dense(base):
        return []
    return list(strided_steps(NodeInserter(node), base, base.as_strided(*where)))


def _views(node: fx.Node, steps: Sequence[ViewStep]) -> list[fx.Node]:
    """The operand, and its value after each step."""
    values = [node.all_input_nodes[0]]
    for step in steps:
        values.append(NodeInserter(node).view(values[-1], step))
    return values


def _scattered(node: fx.Node, steps: Sequence[ViewStep]) -> Any:
    """Scatter the region back through the same views, in reverse order."""
    part: Any = node.args[1]
    for value, step in zip(_views(node, steps[:-1])[::-1], steps[::-1], strict=True):
        part = written_back(NodeInserter(node), step, value, part)
    return part
