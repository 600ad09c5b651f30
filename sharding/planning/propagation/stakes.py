"""Strategies for restoring a lost axis: which dim to split over it again.

If an operation loses an axis, no later value is split over it unless it is restored. Restoring is free
where values are whole: after a sum over the axis is complete or a dim was gathered, another dim can be
split over it at no cost. Two strategies choose the dim:

- `Stakes`: the dim whose split saves the most work. Only the rest of the program determines this work, so
  it is computed from the end: the work of the operations that keep the dim, along the heaviest path.
- `Beside`: the dim along which an earlier plan splits the value's heaviest use (for a gradient, often the
  product with activations that are split), traced back to the value through the operations between.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import fx

from torchard.sharding.layouts.factors import Factors, Rule
from torchard.sharding.layouts.layout import Layout, Sizes, Sub
from torchard.sharding.layouts.options import Option, atomic, factor_axes, image
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import result_index

__all__ = ["Beside", "Spread", "Stakes"]

WorkOf = Callable[[fx.Node], float]
Axes = frozenset[str]


class Spread(Protocol):
    """A strategy for restoring axes."""

    def layout(self, node: fx.Node, axes: Axes) -> Layout | None:
        """A layout of a node's first result, split over some of ``axes``; None if no split saves work."""


class Stakes:
    """For every value and dim, the work on the heaviest path on which a split of the dim is kept.

    Args:
        constraints: for nodes that constrain a layout, whether each dim may be split: where not, its
            path ends.
        work: the work of an operation.
        comes_apart: whether an operation's whole dims can be split by decomposing it.
    """

    def __init__(
        self,
        graph: fx.Graph,
        constraints: Mapping[fx.Node, Sequence[bool]],
        sizes: Sizes,
        work: WorkOf,
        comes_apart: Callable[[fx.Node], bool],
    ) -> None:
        self._table, self._work, self._comes_apart = dict(sizes), work, comes_apart
        self._known: dict[fx.Node, list[list[float]]] = {}  # by node, then by result and dim
        for node in reversed(graph.nodes):
            if node.op == "call_function":
                self._read(node, constraints.get(node))

    def layout(self, node: fx.Node, axes: Axes) -> Layout | None:
        shapes = Call.of(node).outs
        if node not in self._known or not shapes:
            return None
        local = list(shapes[0])
        split: list[tuple[str, ...]] = [()] * len(local)
        for axis in sorted(axes):
            each = [-(-n // self._table[axis]) for n in local]
            saved = [
                worth * (1 - part / max(n, 1))
                for worth, n, part in zip(self._known[node][0], local, each, strict=True)
            ]
            best = max(range(len(saved)), key=saved.__getitem__, default=None)
            if best is not None and saved[best] > 0:
                split[best], local[best] = (*split[best], axis), each[best]
        if not any(split):
            return None
        return Layout(tuple((Sub(n, a),) for n, a in zip(shapes[0], split, strict=True)))

    def _of(self, node: fx.Node, result: int = 0) -> list[float]:
        if node not in self._known:
            self._known[node] = [[0.0] * len(shape) for shape in Call.of(node).outs]
        return self._known[node][result]

    def _raise(self, node: fx.Node, result: int, to: list[float]) -> None:
        own = self._of(node, result)
        own[:] = map(max, own, to)

    def _read(self, node: fx.Node, may_split: Sequence[bool] | None) -> None:
        if node.target is operator.getitem:
            self._raise(node.all_input_nodes[0], result_index(node), self._of(node))
        elif may_split is not None:
            kept = [s if on else 0.0 for s, on in zip(self._of(node), may_split, strict=True)]
            self._raise(node.all_input_nodes[0], 0, kept)
        else:
            self._carry(node)

    def _carry(self, node: fx.Node) -> None:
        call = Call.of(node)
        rule, apart, work = rule_of(call), self._comes_apart(node), self._work(node)
        carried: dict[int, float] = {}
        for i, dims in enumerate(rule.outs):
            for factors, stake in zip(dims, self._of(node, i), strict=True):
                outer = _outer(rule, factors)
                if outer is not None:
                    carried[outer] = max(carried.get(outer, 0.0), stake)
        for dim, blocks in rule.ties:
            carried[dim] = carried[blocks] = max(carried.get(dim, 0.0), carried.get(blocks, 0.0))
        for operand, dims in zip(call.operands, rule.ins, strict=True):
            worth = [0.0] * len(dims)
            for d, factors in enumerate(dims):
                outer = _outer(rule, factors)
                if outer is None or (outer in rule.whole and not apart):
                    continue
                behind = carried.get(outer, 0.0)
                if outer in rule.whole and outer not in carried and len(self._of(node)) == len(dims):
                    behind = self._of(node)[d]  # the dim that a window's dim becomes
                worth[d] = work + behind
            self._raise(operand, 0, worth)


def _outer(rule: Rule, factors: Factors) -> int | None:
    """The factor of a dim that is split first."""
    return next((f for f in factors if rule.sizes[f] > 1), None)


class Beside:
    """For every value, the layout in which a plan splits its heaviest use, along lost axes only.

    Args:
        options: the plan's option of each operation.
        axes: the axes to restore.
    """

    def __init__(
        self,
        graph: fx.Graph,
        constraints: Mapping[fx.Node, Layout],
        sizes: Sizes,
        work: WorkOf,
        options: Mapping[fx.Node, Option],
        axes: Axes,
    ) -> None:
        self._sizes, self._axes = sizes, axes
        self._known: dict[tuple[fx.Node, int], tuple[float, Layout]] = {}
        for node in reversed(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                if (node, 0) in self._known:
                    self._want(node.all_input_nodes[0], result_index(node), *self._known[node, 0])
            elif node in constraints:
                self._want(node.all_input_nodes[0], 0, 0.0, constraints[node])
            else:
                self._carry(node, options[node], work(node))

    def layout(self, node: fx.Node, axes: Axes) -> Layout | None:
        if (node, 0) not in self._known:
            return None
        want = self._known[node, 0][1].along(axes, self._sizes)
        return want if want.split_axes else None

    def _want(self, node: fx.Node, result: int, weight: float, layout: Layout) -> None:
        want = layout.along(self._axes, self._sizes)
        if want.split_axes and weight > self._known.get((node, result), (-1.0,))[0]:
            self._known[node, result] = weight, want

    def _carry(self, node: fx.Node, option: Option, work: float) -> None:
        call = Call.of(node)
        for operand, layout in zip(call.operands, option.ins, strict=True):
            self._want(operand, 0, work, layout)
        rule = rule_of(call)
        if (node, 0) not in self._known or not rule.outs:
            return
        weight, want = self._known[node, 0]
        rule = atomic(rule, [], [want], self._sizes)
        axes_of = factor_axes(rule, rule.outs[0], want, self._sizes)
        for dim, blocks in rule.ties:
            axes_of |= {f: axes_of[g] for f, g in ((dim, blocks), (blocks, dim)) if g in axes_of}
        axes = [axes_of.get(f, ()) if f not in rule.whole else () for f in range(len(rule.sizes))]
        for operand, dims in zip(call.operands, rule.ins, strict=True):
            self._want(operand, 0, weight + work, image(dims, rule, axes, (), self._sizes))

