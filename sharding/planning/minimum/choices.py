"""What each operation and each value may do along one mesh axis, while the others are used as before."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import fx

from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.markers import again, enter, leave
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.factors import Rule
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import Option, atomic, build, factor_axes
from torchard.sharding.planning.decision import Given, LayoutDecision
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import result_index

__all__ = ["Choices", "values_of"]

_CARRIES = (enter, again, leave)
Passed = tuple[tuple[str, frozenset[int]], ...]


class Choices:
    """The options of each operation and the layouts of each value, along one axis.

    Attributes:
        options: by operation.
        layouts: by value: all in which an operation computes it, and all in which one reads it.
    """

    def __init__(
        self, graph: fx.Graph, given: Given, sizes: Sizes, axis: str, now: LayoutDecision
    ) -> None:
        self.graph, self.given, self.sizes, self.axis, self.now = graph, given, sizes, axis, now
        self.options: dict[fx.Node, tuple[Option, ...]] = {}
        self.layouts: dict[fx.Node, dict[Layout, None]] = defaultdict(dict)
        for node, home in now.home.items():
            self.layouts[node][home] = None
        for value, layout in zip(output_values(graph), now.outputs, strict=True):
            self.layouts[value][layout] = None
        self._enumerate()

    def _enumerate(self) -> None:
        """Rules are cut where the layouts of values are: until no layout is new."""
        seen: dict[fx.Node, object] = {}
        changed = True
        while changed:
            changed = False
            for node, option in self.now.option.items():
                call = Call.of(node)
                cuts = self._cuts(node, call)
                if seen.get(node) == cuts:
                    continue
                seen[node], changed = cuts, True
                if node.target in _CARRIES:
                    self.options[node] = self._carried(node, call)
                else:
                    self.options[node] = _options(
                        rule_of(call), option, cuts, self.axis, self.sizes
                    )
                self._note(node, call)

    def _note(self, node: fx.Node, call: Call) -> None:
        values = values_of(node)
        for option in self.options[node]:
            for operand, layout in zip(call.operands, option.ins, strict=True):
                self.layouts[operand][layout] = None
            for i, value in values.items():
                self.layouts[value][option.outs[i]] = None

    def _cuts(self, node: fx.Node, call: Call) -> tuple[tuple[int, Layout], ...]:
        """Layouts of operands (by position) and of the first result (-1) with dims of several parts."""
        if node.target in _CARRIES:
            known = [(k, x) for k, v in enumerate((*call.operands, node)) for x in self.layouts[v]]
            return tuple(known)
        found = [
            (k, layout)
            for k, operand in enumerate(call.operands)
            for layout in self.layouts[operand]
            if _in_parts(layout)
        ]
        first = values_of(node).get(0)
        if first is not None:
            found += [(-1, layout) for layout in self.layouts[first] if _in_parts(layout)]
        return tuple(found)

    def _carried(self, node: fx.Node, call: Call) -> tuple[Option, ...]:
        """A carry enters, is handed on, and leaves in one layout."""
        rule = rule_of(call)
        layouts = dict.fromkeys(
            x.reduced() for v in (*call.operands, node) for x in self.layouts[v]
        )
        made: dict[Layout, Option] = {}
        for layout in layouts:
            cut = atomic(rule, [layout] * len(call.operands), [layout], self.sizes)
            axes_of = factor_axes(cut, cut.outs[0], layout, self.sizes)
            axes = tuple(axes_of.get(f, ()) for f in range(len(cut.sizes)))
            option = build(cut, axes, (), self.sizes)
            if option is not None and option.outs == (layout,):
                made[layout] = option
        return tuple(made.values())


def values_of(node: fx.Node) -> dict[int, fx.Node]:
    """The values that an operation computes, by the index of the result."""
    if isinstance(VAL.of(node), (tuple, list)):
        return {
            result_index(user): user for user in node.users if hasattr(VAL.get(user), "shape")
        }
    return {0: node}


def _in_parts(layout: Layout) -> bool:
    return any(len(dim) > 1 for dim in layout.dims)


@functools.lru_cache(maxsize=16384)
def _options(
    rule: Rule, option: Option, cuts: tuple[tuple[int, Layout], ...], axis: str, sizes: Sizes
) -> tuple[Option, ...]:
    """The options that use all other axes as one does; that one first."""
    whole = [Layout.replicated(layout.shape) for layout in option.ins]
    rules = {option.rule: None, rule: None}
    for k, layout in cuts:
        ins = whole if k < 0 else [*whole[:k], layout, *whole[k + 1 :]]
        rules[atomic(rule, ins, [layout] if k < 0 else [], sizes)] = None
    found = {(option.ins, option.outs): option}
    for cut in rules:
        for other in _along(cut, option, axis, sizes):
            found.setdefault((other.ins, other.outs), other)
    return tuple(found.values())


def _along(rule: Rule, option: Option, axis: str, sizes: Sizes) -> Iterator[Option]:
    """The options of a rule in which one axis has another role, or none."""
    others = _others(rule, option, axis, sizes)
    passed = tuple((a, group) for a, group in option.passed if a != axis)
    blocks = {blocks for _, blocks in rule.ties}
    free = [f for f, n in enumerate(rule.sizes) if n > 1 and f not in rule.whole and f not in blocks]
    choices: list[tuple[tuple[tuple[str, ...], ...], Passed]] = [(others, passed)]
    choices += [(axes, passed) for f in free for axes in _with_axis(others, f, axis, sizes)]
    choices += [(others, (*passed, (axis, group))) for group in rule.linear]
    for axes, through in choices:
        made = build(rule, axes, tuple(sorted(through, key=lambda p: p[0])), sizes)
        if made is not None:
            yield made


def _others(rule: Rule, option: Option, axis: str, sizes: Sizes) -> tuple[tuple[str, ...], ...]:
    """The other axes that split each factor of a rule, as in an option of perhaps another cut."""
    if rule == option.rule:
        return tuple(tuple(a for a in axes if a != axis) for axes in option.axes)
    found: dict[int, tuple[str, ...]] = {}
    pairs = [*zip(rule.ins, option.ins, strict=True), *zip(rule.outs, option.outs, strict=True)]
    for dims, layout in pairs:
        for f, axes in factor_axes(rule, dims, layout, sizes).items():
            found.setdefault(f, tuple(a for a in axes if a != axis))
    used: set[str] = set()
    clean: list[tuple[str, ...]] = []
    for f in range(len(rule.sizes)):
        kept = tuple(a for a in found.get(f, ()) if a not in used)
        used.update(kept)
        clean.append(kept if f not in rule.whole else ())
    return tuple(clean)


def _with_axis(
    axes: Sequence[tuple[str, ...]], factor: int, axis: str, sizes: Sizes
) -> Iterator[tuple[tuple[str, ...], ...]]:
    """A factor split over one more axis, at each place among its axes; in the mesh's order first."""
    order = [a for a, _ in sizes]
    have = axes[factor]
    places = sorted(
        range(len(have) + 1),
        key=lambda i: [order.index(a) for a in (*have[:i], axis, *have[i:])],
    )
    for i in places:
        yield (*axes[:factor], (*have[:i], axis, *have[i:]), *axes[factor + 1 :])
