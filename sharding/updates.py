"""Which outputs are updates of inputs: new parameters, optimizer state."""

from __future__ import annotations

import operator

import torch
from torch import fx

from torchard.sharding.rules import lookup

__all__ = ["updated_inputs"]


def updated_inputs(graph: fx.Graph) -> dict[int, fx.Node]:
    """For each output that is made elementwise from one same-shaped input: that input.

    Where several inputs qualify (parameter and momentum), the first reached from the output does:
    their specs agree in any sensible program.
    """
    found: dict[int, fx.Node] = {}
    for i, value in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
        if isinstance(value, fx.Node) and value.op != "placeholder":
            source = _source(value)
            if source is not None:
                found[i] = source
    return found


def _source(output: fx.Node) -> fx.Node | None:
    shape = output.meta["val"].shape
    if not shape:
        return None
    stack, seen = [output], {output}
    while stack:
        node = stack.pop()
        if node.op == "placeholder":
            return node
        if not _elementwise(node):
            continue
        for operand in reversed(node.all_input_nodes):
            val = operand.meta.get("val")
            if operand not in seen and isinstance(val, torch.Tensor) and val.shape == shape:
                seen.add(operand)
                stack.append(operand)
    return None


def _elementwise(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    tags = getattr(node.target, "tags", ())
    rule = lookup(node.target)
    return torch.Tag.pointwise in tags or (rule is not None and rule.text == "... -> ...")
