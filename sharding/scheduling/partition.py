"""Partition of a global program into an SPMD program, which is still one graph over global shapes.

The decision of propagation is written into the graph: every node is tagged with its layout, and reshards
are steps between nodes that are the identity on global values. So an SPMD program can be read, rewritten,
and turned back into the global program it came from (``unpartition``) by dropping those steps.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from torchard.functional.programs.graphs import add_call, output_node, output_values, with_operands
from torchard.functional.programs.tagging import forget, inherit
from torchard.functional.programs.tags import LAYOUT, LOOP, STEP, VAL
from torchard.functional.torch_internals import ProgramGraph
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.reshard import cost, plan
from torchard.sharding.layouts.tags import CALL, GATHERED, MOVED, RULE
from torchard.sharding.planning.aliases import is_alias, pull
from torchard.sharding.planning.decision import Given, LayoutDecision
from torchard.sharding.rules import Call
from torchard.sharding.scheduling.collectives import emit_step

__all__ = ["partition", "unpartition"]


def partition(graph: fx.Graph, given: Given, decision: LayoutDecision, sizes: Sizes) -> fx.Graph:
    """The SPMD graph, in which every node is tagged with its layout and every reshard with its step."""
    return _Partition(graph, given, decision, sizes).run()


class _Partition:
    def __init__(self, graph: fx.Graph, given: Given, decision: LayoutDecision, sizes: Sizes) -> None:
        self.old, self.given, self.decision, self.sizes = graph, given, decision, sizes
        self.new = ProgramGraph()
        self.versions: dict[fx.Node, dict[Layout, fx.Node]] = {}
        self.tuples: dict[fx.Node, fx.Node] = {}

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._node(node)
        out = output_node(self.old)
        results = [
            self._fetch(value, layout, out)
            for value, layout in zip(output_values(self.old), self.decision.outputs, strict=True)
        ]
        new_out = self.new.output(tuple(results))
        inherit(new_out, out, "call")
        return self.new

    def _placeholder(self, node: fx.Node) -> None:
        home = self.decision.home.get(node)
        if home is None:  # a cotangent that nothing uses
            tied = self.given.inputs[node]
            assert isinstance(tied, int)
            home = self.decision.outputs[tied]
        copied = self.new.node_copy(node)
        inherit(copied, node, "call")
        LAYOUT.set(copied, home)
        self.versions[node] = {home: copied}

    def _node(self, node: fx.Node) -> None:
        if node in self.given.constraints or node in self.given.relative:
            (source,) = node.all_input_nodes
            pinned = self.decision.home[node]
            self.versions[node] = {pinned: self._fetch(source, pinned, node)}
        elif node.target is operator.getitem:
            self._getitem(node)
        else:
            self._operation(node)

    def _getitem(self, node: fx.Node) -> None:
        raw = self.decision.raw_item(node)
        if raw is not None:
            whole = self.tuples[node.all_input_nodes[0]]
            self._publish(node, raw, self._call(node, raw, (whole, node.args[1]), {}))

    def _operation(self, node: fx.Node) -> None:
        option = self.decision.option[node]
        call = Call.of(node)
        operands = [
            self._fetch(o, layout, node) for o, layout in zip(call.operands, option.ins, strict=True)
        ]
        computed = self._copy(node, operands, option.outs, node)
        GATHERED.set(computed, option.rule.gathered and bool(call.ins))
        if isinstance(VAL.of(node), (tuple, list)):
            self.tuples[node] = computed
        else:
            self._publish(node, option.outs[0], computed)

    def _copy(
        self, node: fx.Node, operands: list[fx.Node], outs: tuple[Layout, ...], user: fx.Node
    ) -> fx.Node:
        args, kwargs = with_operands(node, operands)
        layout = outs[0] if not isinstance(VAL.of(node), (tuple, list)) else outs
        computed = self._call(node, layout, args, kwargs)
        MOVED.set(computed, node.name)
        if user is not node:
            _put_in_loop(computed, user)
        return computed

    def _call(
        self, node: fx.Node, layout: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        computed = add_call(node, node.target, *args, graph=self.new, same="call", **kwargs)
        LAYOUT.set(computed, layout)
        return computed

    def _publish(self, node: fx.Node, raw: Layout, computed: fx.Node) -> None:
        """Publish a computed value to its users, with pending sums resolved where the plan says so."""
        self.versions[node] = {raw: computed}
        home = self.decision.home[node]
        if home != raw:
            self._move(node, raw, home, node)

    def _fetch(self, node: fx.Node, want: Layout, user: fx.Node) -> fx.Node:
        have = self.versions[node]
        if want in have:
            return have[want]
        if is_alias(node) and node.target is not operator.getitem:
            viewed = self._view_again(node, want, user)
            if viewed is not None:
                return viewed
        kept = self.decision.kept.get(node, want)
        if kept != want and kept not in have:
            self._fetch(node, kept, user)
        return self._move(node, self._nearest(node, want), want, user)

    def _nearest(self, node: fx.Node, want: Layout) -> Layout:
        usable = [v for v in self.versions[node] if set(want.pending) <= set(v.pending)]
        return min(usable, key=lambda v: cost(v, want, self.sizes))

    def _view_again(self, node: fx.Node, want: Layout, user: fx.Node) -> fx.Node | None:
        """Reshard a view by resharding its base, for all its aliases, and repeating the view."""
        base = node.all_input_nodes[0]
        layout = pull(node, want, self.sizes)
        if layout is None or not set(layout.pending) <= set(self.decision.home[base].pending):
            return None
        if self._distance(node, want) < self._distance(base, layout):
            return None
        computed = self._copy(node, [self._fetch(base, layout, user)], (want,), user)
        self.versions[node][want] = computed
        return computed

    def _distance(self, node: fx.Node, want: Layout) -> float:
        return cost(self._nearest(node, want), want, self.sizes)

    def _move(self, node: fx.Node, have: Layout, want: Layout, user: fx.Node) -> fx.Node:
        value = self.versions[node][have]
        for step in plan(have, want, self.sizes):
            value = emit_step(self.new, value, step, user, self.sizes)
            MOVED.set(value, node.name)
            _put_in_loop(value, user)
        self.versions[node][want] = value
        return value


def _put_in_loop(node: fx.Node, user: fx.Node) -> None:
    """Put a value that is computed for a user into the user's loop, into its operand's, or into no loop.

    What no iteration changes is computed once, before the loop.
    """
    around = next((LOOP.of(operand) for operand in node.all_input_nodes if LOOP.on(operand)), None)
    loop = LOOP.get(user, around)
    if around is None or loop is None:
        forget(node, LOOP)
    else:
        LOOP.set(node, loop)


def unpartition(graph: fx.Graph) -> fx.Graph:
    """The global graph of an SPMD graph, without its steps and layouts."""
    new = ProgramGraph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if STEP.on(node):
            env[node] = env[node.all_input_nodes[0]]
            continue
        env[node] = new.node_copy(node, lambda n: env[n])
        forget(env[node], LAYOUT, GATHERED, CALL, RULE)
    return new

