"""Propagation: which axis splits which factor of every operation of a joint program.

Sweeps (``sweep.py``) are repeated with the layouts that consumers preferred as additional options for
their producers, and the cheapest sweep is kept. Nothing outside these two files depends on how sweeps
choose.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from torch import fx

from torchard.functional.programs.graphs import output_node, output_values
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.decompositions.decompose import comes_apart
from torchard.sharding.layouts.layout import Layout, Sizes, Sub
from torchard.sharding.layouts.options import atomic, factor_axes, image
from torchard.sharding.planning.decision import Given, LayoutDecision, Relation, work_of
from torchard.sharding.planning.propagation.stakes import Beside, Spread, Stakes
from torchard.sharding.planning.propagation.sweep import Needs, NodeFacts, Start, Sweep, TakeApart
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import result_index

__all__ = ["SWEEPS", "Propagation", "propagate", "take_apart"]

SWEEPS = 4


class Propagation:
    """Decides the layout of every value of a program, by sweeps that can be continued.

    Args:
        near: an earlier decision; lost axes are restored on the dims along which it splits neighbouring
            values. If None, lost axes are restored on the dims with the most work.
    """

    def __init__(
        self, graph: fx.Graph, given: Given, sizes: Sizes, near: LayoutDecision | None = None
    ) -> None:
        self.graph, self.given, self.sizes = graph, given, sizes
        self._start = _start(graph, given, sizes)
        self._spread = _spread(graph, given, sizes, near=near)
        self._decisions: list[LayoutDecision] = []
        self._settled = False

    def after(self, sweeps: int) -> LayoutDecision:
        """The cheapest decision of so many sweeps, or of fewer, if the next one would change nothing."""
        while len(self._decisions) < sweeps and not self._settled:
            self._sweep()
        return min(self._decisions, key=lambda decision: decision.total(self.given.machine))

    def _sweep(self) -> None:
        start = self._start
        sweep = Sweep(self.graph, self.given, self.sizes, start, self._spread)
        self._decisions.append(sweep.run())
        self._settled = sweep.needs == start.needs and sweep.handed == start.handed
        self._start = start.after(sweep.needs, sweep.handed)


def propagate(
    graph: fx.Graph,
    given: Given,
    sizes: Sizes,
    sweeps: int = SWEEPS,
    near: LayoutDecision | None = None,
) -> LayoutDecision:
    """The decision of a propagation after a bounded number of sweeps; see `Propagation`."""
    return Propagation(graph, given, sizes, near).after(sweeps)


def take_apart(graph: fx.Graph, given: Given, sizes: Sizes, taken: TakeApart) -> None:
    """Decompose operations within one sweep, so that later operations see the resulting layouts.

    Args:
        taken: decomposes a node, given the layouts of its operands, and returns the new nodes, or none if
            it does not decompose the node.
    """
    start = _start(graph, given, sizes)
    Sweep(graph, given, sizes, start, _spread(graph, given, sizes, apart=True), taken).run()


def _start(graph: fx.Graph, given: Given, sizes: Sizes) -> Start:
    wishes, needs = _wishes(graph, given, sizes), _output_needs(graph, given)
    return Start(NodeFacts(given.machine), wishes, {}, needs, {})


def _output_needs(graph: fx.Graph, given: Given) -> Needs:
    needs: Needs = {}
    out = output_node(graph)
    for value, layout in zip(output_values(graph), given.outputs, strict=True):
        if layout is not None:
            needs.setdefault(value, {})[out] = layout
    return needs


def _wishes(graph: fx.Graph, given: Given, sizes: Sizes) -> dict[fx.Node, Layout]:
    """The layouts of constraints, carried back through elementwise operations to a reduction."""
    wishes: dict[fx.Node, Layout] = {}
    required = given.required(sizes)
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        if node in required:
            (source,) = node.all_input_nodes
            wish = required[node]
            if node in given.relative and node in wishes:
                wish = given.relative[node](wishes[node].reduced(), sizes)
            if node in given.constraints or wish.split_axes:
                wishes.setdefault(source, wish)
        elif node in wishes and node.target is operator.getitem:
            (source,) = node.all_input_nodes
            if Call.of(source).outs[result_index(node)] == Call.of(source).outs[0]:
                wishes.setdefault(source, wishes[node])
        elif node in wishes:
            _carry_back(node, wishes, sizes)
    return wishes


def _carry_back(node: fx.Node, wishes: dict[fx.Node, Layout], sizes: Sizes) -> None:
    call = Call.of(node)
    rule = rule_of(call)
    rows = node.target is aten.unbind.int  # all rows have one layout
    if not rows and (len(call.outs) != 1 or rule.combine or rule.whole):
        return
    rule = atomic(rule, [], [wishes[node]], sizes)
    axes_of = factor_axes(rule, rule.outs[0], wishes[node], sizes)
    axes = [axes_of.get(f, ()) for f in range(len(rule.sizes))]
    for operand, dims in zip(call.operands, rule.ins, strict=True):
        on = {f for d in dims for f in d}
        if all(f in on for f in axes_of):
            wishes.setdefault(operand, image(dims, rule, axes, (), sizes))


def _spread(
    graph: fx.Graph,
    given: Given,
    sizes: Sizes,
    *,
    apart: bool = False,
    near: LayoutDecision | None = None,
) -> Spread | None:
    """The strategy that restores lost axes.

    Args:
        apart: whether operations that can be decomposed are decomposed.
        near: as for `propagate`.
    """
    if not given.spread:
        return None
    work = functools.partial(work_of, machine=given.machine)
    if near is not None:
        fixed = given.constraints | {node: near.home[node] for node in given.relative}
        return Beside(graph, fixed, sizes, work, near.option, given.spread)
    return Stakes(
        graph, _kept(given, sizes), sizes, work, comes_apart if apart else lambda _: False
    )


def _kept(given: Given, sizes: Sizes) -> dict[fx.Node, list[bool]]:
    """For each constraint node, whether it keeps a split of each dim of its value over lost axes."""
    fixed = {n: [any(s.axes for s in dim) for dim in x.dims] for n, x in given.constraints.items()}
    return fixed | {
        node: [
            any(_keeps(relation, shape, d, axis, sizes) for axis in given.spread)
            for d in range(len(shape))
        ]
        for node, relation in given.relative.items()
        for shape in [tuple(VAL.of(node).shape)]
    }


def _keeps(relation: Relation, shape: Sequence[int], dim: int, axis: str, sizes: Sizes) -> bool:
    split = Layout(tuple((Sub(n, (axis,) if d == dim else ()),) for d, n in enumerate(shape)))
    return relation(split, sizes).dim_of(axis) == dim
