"""What each operation and each value may do along some mesh axes, while the others are used as before."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from torchard.functional.costs.flops import is_product
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.markers import again, enter, leave, row
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.factors import Rule
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import Option, atomic, build, factor_axes
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.planning.decision import Given, LayoutDecision, gathered_axes
from torchard.sharding.planning.minimum.alternatives import Alternatives, source_of, values_of
from torchard.sharding.planning.minimum.elimination import TooWide
from torchard.sharding.rules import Call, rule_of

__all__ = ["CARRIES", "Choices", "columns", "is_part"]

CARRIES = (enter, again, leave)
_MOVES = 400_000  # from one layout of a value to another
Passed = tuple[tuple[str, frozenset[int]], ...]


class Choices:
    """The options of each operation and the layouts of each value, along one axis or several.

    Raises:
        TooWide: there are too many of them.

    Attributes:
        options: by operation; the first is that of the decision.
        layouts: by value: all in which an operation computes it, and all in which one reads it.
        staying: split inputs, and views of them, that the decision does not move: products are split as
            the parameters are that they read. None if the time on a given machine decides, or if products
            stay as they are: along axes that split both parameters and a batch.
    """

    def __init__(
        self,
        graph: fx.Graph,
        given: Given,
        sizes: Sizes,
        axes: tuple[str, ...],
        now: LayoutDecision,
        alternatives: Alternatives,
        most: int,
    ) -> None:
        self.sizes, self.axes, self.now, self.most = sizes, axes, now, most
        self.value, self._versions = alternatives.value, alternatives.versions
        self._relative, self._local = given.relative, given.local
        self._gathered = not given.on and not gathered_axes(given).isdisjoint(axes)
        values = output_values(graph)
        self.cotangents: dict[int, list[fx.Node]] = defaultdict(list)  # by the output of their layout
        self._tied: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, known in given.inputs.items():
            if isinstance(known, int) and given.outputs[known] is None:
                self.cotangents[known].append(node)
                self._tied[self.value(values[known])].append(node)
        self.options: dict[fx.Node, tuple[Option, ...]] = {}
        self.layouts: dict[fx.Node, dict[Layout, None]] = defaultdict(dict)
        self._in_parts: dict[fx.Node, list[Layout]] = defaultdict(list)
        free = given.on or self._gathered
        self.staying = set[fx.Node]() if free else _staying(graph, given, now)
        # Most values are neither: nothing else depends on what layouts they may have.
        constrained = (v for node in given.relative for v in (node, *node.all_input_nodes))
        self._related = {*self._tied, *map(self.value, constrained)}
        carries = [node for node in now.option if node.target in CARRIES]
        self._carried_on = {
            self.value(v) for node in carries for v in (*node.all_input_nodes, *values_of(node).values())
        }
        self._waiting, self._moves = dict.fromkeys(now.option), 0
        for node, layout in (*now.home.items(), *now.kept.items()):
            self._add(node, (layout,))
        for value, layout in zip(values, now.outputs, strict=True):
            self._add(value, (layout,))
        while self._waiting:  # rules are cut where the layouts of values are, until none is new
            node = next(iter(self._waiting))
            del self._waiting[node]
            self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        call = Call.of(node)
        found = self._carried(node, call) if node.target in CARRIES else self._options(node, call)
        if self.options.get(node) == found:
            return
        if len(found) > self.most:
            raise TooWide
        self.options[node] = found
        ins, outs = columns(found)
        for operand, layouts in zip(call.operands, ins, strict=True):
            self._add(operand, layouts)
        for i, value in values_of(node).items():
            self._add(value, outs[i])

    def _options(self, node: fx.Node, call: Call) -> tuple[Option, ...]:
        option, local = self.now.option[node], self._local.get(node)
        if self._gathered and is_product(node):
            return (option,)
        if local is not None:
            option = local.free(option, self.sizes)
        found = _options(rule_of(call), option, self._cuts(node, call), self.axes, self.sizes)
        return found if local is None else local.among(found, self.sizes)

    def _add(self, value: fx.Node, layouts: Iterable[Layout]) -> None:
        """Add layouts of a value; operations that they may cut are visited again."""
        value = self.value(value)
        known = self.layouts[value]
        for layout in layouts:
            if layout in known:
                continue
            known[layout] = None
            self._moves += 2 * len(known) - 1
            if self._moves > _MOVES:
                raise TooWide
            if layout.in_parts:
                self._in_parts[value].append(layout)
                self._waiting.update(dict.fromkeys(self._near(value)))
            elif value in self._carried_on:
                near = [n for n in self._near(value) if n.target in CARRIES]
                self._waiting.update(dict.fromkeys(near))
            if value in self._related:
                self._relate(value, layout)

    def _relate(self, value: fx.Node, layout: Layout) -> None:
        """Add the nearest allowed layouts of a value, of constraints that read it, and of cotangents."""
        for node in self._tied.get(value, ()):
            self._add(node, (layout.reduced(),))
        versions = self._versions.get(value, (value,))
        for node in (value, *(user for version in versions for user in version.users)):
            if node in self._relative:
                self._add(node, (self._relative[node](layout.reduced(), self.sizes),))

    def _near(self, value: fx.Node) -> Iterator[fx.Node]:
        """The operations that compute a value, and those that read it."""
        for version in self._versions.get(value, (value,)):
            yield from (n for n in (source_of(version), *version.users) if n in self.now.option)

    def _cuts(self, node: fx.Node, call: Call) -> tuple[tuple[int, Layout], ...]:
        """Layouts of operands (by position) and of the first result (-1) with dims of several parts."""
        pairs = [*enumerate(call.operands)]
        if 0 in (values := values_of(node)):
            pairs.append((-1, values[0]))
        return tuple([(k, x) for k, value in pairs for x in self._in_parts[self.value(value)]])

    def _carried(self, node: fx.Node, call: Call) -> tuple[Option, ...]:
        """A carry enters, is handed on, and leaves in one layout."""
        rule = rule_of(call)
        layouts = dict.fromkeys(
            x.reduced() for v in (*call.operands, node) for x in self.layouts[self.value(v)]
        )
        made: dict[Layout, Option] = {}
        for layout in layouts:
            cut = atomic(rule, [layout] * len(call.operands), [layout], self.sizes)
            axes_of = factor_axes(cut, cut.outs[0], layout, self.sizes)
            axes = tuple(axes_of.get(f, ()) for f in range(len(cut.sizes)))
            option = build(cut, axes, (), self.sizes)
            if option is not None and node in self._local:
                option = next(iter(self._local[node].among([option], self.sizes)), None)
            if option is not None and option.outs == (layout,):
                made[layout] = option
        return tuple(made.values())


def _staying(graph: fx.Graph, given: Given, now: LayoutDecision) -> set[fx.Node]:
    """The split inputs, with all of their views, that all operations read where they are."""
    known = {n: known[0] for n, known in given.inputs.items() if not isinstance(known, int)}
    for node in graph.nodes:
        if node in given.constraints and node.all_input_nodes[0] in given.inputs:
            known[node] = given.constraints[node]
    inputs = {n: n for n, layout in known.items() if layout.split_axes}  # by themselves and by view
    for node in graph.nodes:
        if (is_part(node) or node in given.relative) and node.all_input_nodes[0] in inputs:
            inputs[node] = inputs[node.all_input_nodes[0]]
    moved = {
        source
        for view, source in inputs.items()
        if view not in now.home or not all(_reads_home(u, view, now, given) for u in view.users)
    }
    return {view for view, source in inputs.items() if source not in moved}


def is_part(node: fx.Node) -> bool:
    """Whether a node is a view, a row or a cast of its operand."""
    return is_alias(node) or node.target in (row, aten._to_copy.default)


def _reads_home(user: fx.Node, value: fx.Node, now: LayoutDecision, given: Given) -> bool:
    if user in given.relative:
        return now.home[user] == now.home[value]
    option = now.option.get(user)
    if option is None:
        return True
    operands = zip(Call.of(user).operands, option.ins, strict=True)
    return all(layout == now.home[value] for operand, layout in operands if operand is value)


Columns = tuple[tuple[Layout, ...], ...]


@functools.lru_cache(maxsize=16384)
def columns(options: tuple[Option, ...]) -> tuple[Columns, Columns]:
    """The layouts of each operand, and of each result, by option."""
    return (
        tuple(zip(*(o.ins for o in options), strict=True)),
        tuple(zip(*(o.outs for o in options), strict=True)),
    )


@functools.lru_cache(maxsize=16384)
def _options(
    rule: Rule,
    option: Option,
    cuts: tuple[tuple[int, Layout], ...],
    axes: tuple[str, ...],
    sizes: Sizes,
) -> tuple[Option, ...]:
    """The options that use all other axes as one does; that one first."""
    whole = [Layout.replicated(layout.shape) for layout in option.ins]
    rules = {option.rule: None, rule: None}
    for k, layout in cuts:
        ins = whole if k < 0 else [*whole[:k], layout, *whole[k + 1 :]]
        rules[atomic(rule, ins, [layout] if k < 0 else [], sizes)] = None
    found = {(option.ins, option.outs): option}
    for axis in axes:
        for one, cut in itertools.product([*found.values()], rules):
            for other in _along(cut, one, axis, sizes):
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
