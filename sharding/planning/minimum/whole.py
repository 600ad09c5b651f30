"""The decision in which no operation is split: minima begin with it."""

from __future__ import annotations

import operator

from torch import fx

from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import build
from torchard.sharding.planning.decision import Given, LayoutDecision
from torchard.sharding.rules import Call, rule_of

__all__ = ["all_whole"]


def all_whole(graph: fx.Graph, given: Given, sizes: Sizes) -> LayoutDecision:
    """A decision in which each operation is computed whole by every rank."""
    made = LayoutDecision()
    for node in graph.nodes:
        if node.op == "placeholder":
            known = given.inputs[node]
            if isinstance(known, tuple):
                made.home[node] = known[0]
        elif node.op != "call_function":
            continue
        elif node.target is operator.getitem:
            if (item := made.raw_item(node)) is not None:
                made.home[node] = item
        elif node in given.constraints:
            made.home[node] = given.constraints[node]
        elif node in given.relative:
            made.home[node] = given.relative[node](_whole(node, made), sizes)
        else:
            _compute(node, given, sizes, made)
    values = zip(output_values(graph), given.outputs, strict=True)
    made.outputs = tuple(made.home[v].reduced() if x is None else x for v, x in values)
    cotangents = {n: known for n, known in given.inputs.items() if isinstance(known, int)}
    made.home |= {node: made.outputs[known] for node, known in cotangents.items()}
    return made


def _compute(node: fx.Node, given: Given, sizes: Sizes, made: LayoutDecision) -> None:
    rule = rule_of(Call.of(node))
    option = build(rule, ((),) * len(rule.sizes), (), sizes)
    assert option is not None, node
    if node in given.local:
        option = given.local[node].applied(option, sizes)
    made.option[node], made.raw[node] = option, option.outs
    if not isinstance(VAL.of(node), (tuple, list)):
        made.home[node] = option.outs[0]


def _whole(node: fx.Node, made: LayoutDecision) -> Layout:
    """The layout of a constrained value where it is whole, along all axes that are not manual."""
    home = made.home.get(node.all_input_nodes[0])
    whole = Layout.replicated(tuple(VAL.of(node).shape))
    return whole if home is None else whole.varying_over(home.varying)
