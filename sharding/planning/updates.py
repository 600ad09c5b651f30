"""Outputs that are updates or gradients of inputs: new parameters, optimizer state, gradients."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.markers import item, listed, row, rows
from torchard.functional.programs.program import Leaf
from torchard.functional.programs.tags import PHASE, STEP, VAL
from torchard.sharding.manual.manual_collectives import is_edge
from torchard.sharding.rules import lookup

__all__ = ["after_backward", "source_of", "updated_inputs"]


def updated_inputs(graph: fx.Graph, outputs: Sequence[Leaf]) -> dict[int, fx.Node]:
    """The input of each output that is an input's elementwise update or gradient.

    If several inputs qualify (parameter and momentum), the first one reached from the output is taken;
    their specs agree in any sensible program.
    """
    inputs = graph.find_nodes(op="placeholder")
    updated: dict[int, fx.Node] = {}
    for i, (leaf, value) in enumerate(zip(outputs, output_values(graph), strict=True)):
        if value.op == "placeholder" or not _shape(value):
            continue
        source = source_of(value)
        if source is None and leaf.role == "output" and leaf.of is not None:
            primal = inputs[leaf.of]  # its shape differs if vmap has batched one of the two since
            source = primal if _shape(primal) == _shape(value) else None
        if source is not None:
            updated[i] = source
    return updated


def after_backward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are computed from gradients after the backward, such as an optimizer's updates."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if PHASE.get(node) == "backward" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    return late


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(VAL.of(node).shape)


def source_of(output: fx.Node) -> fx.Node | None:
    """The input of equal shape that is the value, or from which it is computed elementwise; else None."""
    shape = _shape(output)
    stack: list[tuple[fx.Node, int | None]] = [(output, None)]  # with a row number, in loops
    seen = {output}
    while stack:
        node, row_number = stack.pop()
        if node.op == "placeholder":
            if _shape(node) == shape:
                return node
            continue
        sources = _sources(node, row_number)
        for source in reversed(sources):
            if source[0] not in seen:
                seen.add(source[0])
                stack.append(source)
    return None


def _sources(node: fx.Node, row_number: int | None) -> list[tuple[fx.Node, int | None]]:
    """The operands to which a node corresponds elementwise, and their row numbers."""
    if node.target is item:
        values: Any = node.all_input_nodes[0]
        while STEP.on(values):
            values = values.all_input_nodes[0]
        made = values.target is rows
        return [(values.args[0], node.args[1])] if made else []  # type: ignore[list-item]
    if node.target is row:
        stacked: Any = node.args[0]
        known = stacked.target is listed and row_number is not None
        return [(stacked.args[0][row_number], None)] if known else []
    if not _elementwise(node):
        return []
    return [(operand, row_number) for operand in node.all_input_nodes if _follows(operand, node)]


def _follows(operand: fx.Node, node: fx.Node) -> bool:
    """Whether an operand and a node correspond elementwise, at an edge as global values."""
    val = VAL.get(operand)
    return is_edge(node) or (isinstance(val, torch.Tensor) and tuple(val.shape) == _shape(node))


def _elementwise(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if is_edge(node) or STEP.on(node):  # a step is the identity on global values
        return True
    tags = getattr(node.target, "tags", ())
    rule = lookup(node.target)
    return torch.Tag.pointwise in tags or (rule is not None and rule.text == "... -> ...")
