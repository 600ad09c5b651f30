"""Graphs of one call, run split in a chosen way."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from effort import examples
from sample_calls import Sample
from torch import fx

from torchard.functional.execution.codegen import compiled
from torchard.sharding.layouts.factors import Rule
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.options import Option, build, options
from torchard.sharding.lowering.lower import Lowering
from torchard.sharding.lowering.simulated_transport import SimulatedTransport
from torchard.sharding.lowering.windows import attach_windows
from torchard.sharding.planning.decision import BATCH, Given, LayoutDecision
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.scheduling.partition import partition
from torchard.sharding.testing import contributions
from torchard.sharding.values.mesh import Mesh


@dataclass
class OneOp:
    """A graph of one call, its tensors as placeholders."""

    graph: fx.Graph
    node: fx.Node
    inputs: list[torch.Tensor]
    results: list[torch.Tensor]

    @property
    def rule(self) -> Rule:
        return rule_of(Call.of(self.node))


def one_op(target: Any, sample: Sample) -> OneOp:
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []

    def enter(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(inputs)}")
            node.meta["val"] = value
            inputs.append(value)
            return node
        return [enter(v) for v in value] if isinstance(value, (list, tuple)) else value

    args = tuple(enter(a) for a in sample.args)
    kwargs = {k: enter(v) for k, v in sample.kwargs.items()}
    if sample.zero:
        zeros = graph.call_function(torch.ops.aten.zeros_like.default, args[:1])
        zeros.meta["val"] = sample.args[0]
        args = (zeros, *args[1:])
    node = graph.call_function(target, args, kwargs)
    val = target(*sample.args, **sample.kwargs)
    node.meta["val"] = tuple(val) if isinstance(val, (list, tuple)) else val
    if isinstance(val, torch.Tensor):
        outs, results = [node], [val]
    else:
        outs, results = [], []
        for i, v in enumerate(val):
            if isinstance(v, torch.Tensor):
                outs.append(graph.call_function(operator.getitem, (node, i)))
                outs[-1].meta["val"] = v
                results.append(v)
    graph.output(tuple(outs))
    return OneOp(graph, node, inputs, results)


def run_option(op: OneOp, option: Option, mesh: Mesh) -> list[torch.Tensor]:
    """The call run as the option says, its results made whole by the collectives it implies."""
    placeholders = [n for n in op.graph.nodes if n.op == "placeholder"]
    decision = LayoutDecision(option={op.node: option}, raw={op.node: option.outs})
    for node, want in zip(Call.of(op.node).operands, option.ins, strict=True):
        if node.op == "call_function":
            _create(decision, node, want, mesh)
    decision.home.update(zip(placeholders, option.ins, strict=True))
    outs = list(op.graph.output_node().args[0])
    decision.home.update(zip(outs, option.outs, strict=True))
    decision.outputs = tuple(Layout.replicated(r.shape) for r in op.results)
    inputs = {n: (layout, BATCH) for n, layout in zip(placeholders, option.ins, strict=True)}
    spmd = partition(op.graph, Given(inputs, decision.outputs), decision, mesh.sizes)
    attach_windows(spmd, mesh)
    local = Lowering(spmd, mesh, mesh.all_coords(), SimulatedTransport()).run()
    parts = [
        part
        for value, layout in zip(op.inputs, option.ins, strict=True)
        for part in contributions(value, layout, mesh)
    ]
    return compiled(local)(parts)


def _create(decision: LayoutDecision, node: fx.Node, want: Layout, mesh: Mesh) -> None:
    """Have an operand created in a layout."""
    found = options(rule_of(Call.of(node)), [want], [want], mesh.sizes)
    decision.option[node] = next(o for o in found if o.outs == (want,))
    decision.raw[node], decision.home[node] = (want,), want


FEW = examples(ci=1, explore=0) == 1
MESHES = [Mesh(axes, virtual=True) for axes in ({"a": 2}, {"a": 3}, {"a": 2, "b": 3})]


def ways(op: OneOp) -> Iterator[tuple[Mesh, Option]]:
    """Every factor split over one axis and over two, every pair of factors, every linear claim.

    Pairs in one order of the axes; in `make explore`, in both.
    """
    rule = op.rule
    free = [f for f in range(len(rule.sizes)) if f not in rule.whole]
    one, three, two = MESHES
    choices: list[tuple[Mesh, dict[int, tuple[str, ...]], dict[str, frozenset[int]]]] = [
        (mesh, {f: ("a",)}, {}) for mesh in (one, three) for f in free
    ]
    choices += [(two, {f: axes}, {}) for f in free for axes in (("a", "b"), ("b", "a"))]
    pairs = itertools.combinations(free, 2) if FEW else itertools.permutations(free, 2)
    choices += [(two, {f: ("a",), g: ("b",)}, {}) for f, g in pairs]
    choices += [(mesh, {}, {"a": group}) for mesh in (one, three) for group in rule.linear]
    choices += [(two, {f: ("b",)}, {"a": group}) for f in free for group in rule.linear]
    for mesh, split, passed in choices:
        axes = tuple(split.get(f, ()) for f in range(len(rule.sizes)))
        option = build(rule, axes, tuple(passed.items()), mesh.sizes)
        if option is not None:
            yield mesh, option
