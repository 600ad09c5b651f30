"""Which outputs are updates or gradients of inputs: new parameters, optimizer state, their slopes."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from torchard.functional.programs.tags import PHASE, STEP, VAL
from torchard.sharding.manual.manual_collectives import is_edge
from torchard.sharding.rules import lookup

__all__ = ["after_backward", "source_of", "updated_inputs"]


def updated_inputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """For each output made elementwise from one same-shaped input, or its gradient: that input.

    Where several inputs qualify (parameter and momentum), the first reached from the output does:
    their specs agree in any sensible program.
    """
    found: dict[int, fx.Node] = {}
    rest: dict[int, fx.Node] = {}
    for i, value in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
        if isinstance(value, fx.Node) and value.op != "placeholder" and _shape(value):
            source = source_of(value)
            if source is not None:
                found[i] = source
            elif PHASE.get(value) == "backward":
                rest[i] = value
    return found | dict(_gradients(graph, rest))


def after_backward(graph: fx.Graph) -> set[fx.Node]:
    """What is made of gradients: by a step of an optimizer, new parameters and its state."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if PHASE.get(node) == "backward" or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _gradients(graph: fx.Graph, outputs: dict[int, fx.Node]) -> Iterator[tuple[int, fx.Node]]:
    """Gradients come in the order of their inputs: paired where a shape has as many of both."""
    inputs = [n for n in graph.nodes if n.op == "placeholder" and VAL.of(n).is_floating_point()]
    for shape in dict.fromkeys(map(_shape, outputs.values())):
        sources = [n for n in inputs if _shape(n) == shape]
        slopes = [i for i, value in outputs.items() if _shape(value) == shape]
        if len(sources) == len(slopes):
            yield from zip(slopes, sources, strict=True)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(VAL.of(node).shape)


def source_of(output: fx.Node) -> fx.Node | None:
    """The input that a value is, or is made elementwise from, of its shape; None if there is none."""
    shape = _shape(output)
    stack, seen = [output], {output}
    while stack:
        node = stack.pop()
        if node.op == "placeholder":
            if _shape(node) == shape:
                return node
            continue
        if not _elementwise(node):
            continue
        for operand in reversed(node.all_input_nodes):
            if operand not in seen and _follows(operand, node):
                seen.add(operand)
                stack.append(operand)
    return None


def _follows(operand: fx.Node, node: fx.Node) -> bool:
    """Whether a value and what it is made of are elementwise the same; at an edge, as global values."""
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
