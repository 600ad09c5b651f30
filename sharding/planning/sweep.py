"""One sweep of propagation: for each operation, in order, choose the best option (``options.py``).

Options are compared in this order:

1. parallelism lost: an axis splits an operand but not the operation;
2. a constraint downstream that would be missed;
3. shards moved, by the rank of their origin: batch inputs before parameters before constraints before
   derived values. A shard that is already available in the required layout is not moved;
4. bytes sent, from the cheapest version of each operand to the layouts that consumers prefer;
5. elements of the local results.

Minimising only bytes degenerates: it gathers token ids and small weights and replicates all computation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from torchard.functional.programs.graphs import output_node, output_values
from torchard.functional.programs.loops import times
from torchard.functional.programs.markers import again, enter, leave, rows
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import Option, options
from torchard.sharding.layouts.reshard import cost
from torchard.sharding.planning.aliases import is_alias, pull
from torchard.sharding.planning.decision import (
    BATCH,
    CONSTRAINT,
    DERIVED,
    Given,
    LayoutDecision,
    seconds_per_point,
)
from torchard.sharding.planning.stakes import Spread
from torchard.sharding.rules import Call, rule_of

__all__ = ["Needs", "Start", "Sweep", "TakeApart"]

Needs = dict[fx.Node, dict[fx.Node, Layout]]  # value -> user -> layout as read
TakeApart = Callable[[fx.Node, Sequence[Layout]], list[fx.Node]]


@dataclass(frozen=True)
class Start:
    """The results of earlier sweeps.

    Attributes:
        wishes: for values before a constraint, the layout that the constraint prefers.
        asked: the layouts in which consumers read values, in any sweep.
        needs: the layouts in which consumers read values in the last sweep.
        handed: for each carry of a loop, the layout in which the last sweep computed its next value.
    """

    wishes: dict[fx.Node, Layout]
    asked: dict[fx.Node, dict[Layout, None]]
    needs: Needs
    handed: dict[fx.Node, Layout]

    def after(self, needs: Needs, handed: dict[fx.Node, Layout]) -> Start:
        """These results, updated with the results of one more sweep."""
        asked = self.asked
        for node, by_user in needs.items():
            asked.setdefault(node, {}).update(dict.fromkeys(by_user.values()))
        return Start(self.wishes, asked, needs, handed)


class Sweep:
    """One pass over the graph, in order."""

    def __init__(
        self,
        graph: fx.Graph,
        given: Given,
        sizes: Sizes,
        start: Start,
        spread: Spread | None = None,
        take_apart: TakeApart | None = None,
    ) -> None:
        self.graph, self.given, self.sizes = graph, given, sizes
        self.table = dict(sizes)
        self.start = start
        self.wishes, self.asked, self.needed = start.wishes, start.asked, start.needs
        self.handed: dict[fx.Node, Layout] = {}
        self.spread, self.take_apart = spread, take_apart
        out = output_node(graph)
        self.needs: Needs = {
            node: {out: by_user[out]} for node, by_user in start.needs.items() if out in by_user
        }
        self.versions: dict[fx.Node, dict[Layout, None]] = {}
        self.ranks: dict[fx.Node, dict[str, int]] = {}
        self.had: dict[fx.Node, frozenset[str]] = {}
        self.replaced: set[fx.Node] = set()
        self.decision = LayoutDecision()
        self.values = output_values(graph)
        self.open: dict[int, Layout] = {}

    def run(self) -> LayoutDecision:
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                given = self.given.inputs[node]
                if not isinstance(given, int):
                    layout, rank = given
                    self._record(node, layout, {a: self.given.rank(rank, a) for a in layout.split_axes})
            elif node.op == "call_function":
                self._visit(node)
        out = output_node(self.graph)
        layouts = [self._output(i) for i in range(len(self.values))]
        for value, layout in zip(self.values, layouts, strict=True):
            self._take(value, layout, out)
        self.decision.outputs = tuple(layouts)
        return self.decision

    def home(self, node: fx.Node) -> Layout:
        """The layout of a value; for a cotangent, the layout of its output."""
        known = self.decision.home.get(node)
        if known is not None:
            return known
        tied = self.given.inputs[node]
        assert isinstance(tied, int)
        layout = self._output(tied)
        ranks = self.ranks.get(self.values[tied], {})
        self._record(node, layout, {a: ranks.get(a, DERIVED) for a in layout.split_axes})
        return layout

    def _output(self, i: int) -> Layout:
        """The layout of an output: the required layout, else the value's layout without pending sums."""
        if i not in self.open:
            asked = self.given.outputs[i]
            self.open[i] = self.home(self.values[i]).reduced() if asked is None else asked
        return self.open[i]

    def _record(self, node: fx.Node, layout: Layout, ranks: dict[str, int]) -> None:
        self.decision.home[node] = layout
        self.versions[node] = {layout: None}
        self.ranks[node] = ranks

    # -- one node -------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        if node in self.replaced:
            return
        if node.target is operator.getitem:
            self.had[node] = self.had.get(node.all_input_nodes[0], frozenset())
            self._getitem(node)
        elif node in self.given.constraints:
            self._constrain(node)
        elif node in self.given.relative:
            self._relate(node)
        else:
            self._choose(node)

    def _getitem(self, node: fx.Node) -> None:
        raw = self.decision.raw_item(node)
        if raw is not None:
            source = self.ranks[node.all_input_nodes[0]]
            ranks = {a: r for a, r in source.items() if a in raw.split_axes}
            self._resolve(node, raw, ranks)

    def _constrain(self, node: fx.Node) -> None:
        layout = self.given.constraints[node]
        (source,) = node.all_input_nodes
        self._take(source, layout, node)
        rank = self.given.ranks.get(node, CONSTRAINT)
        # A batch that is constrained to its own split keeps its precedence over parameters.
        home, had = self.home(source), self.ranks[source]
        batch = {a for a in had if had[a] == BATCH and home.dim_of(a) == layout.dim_of(a)}
        ranks = {a: BATCH if a in batch else self.given.rank(rank, a) for a in layout.split_axes}
        self._record(node, layout, ranks)

    def _relate(self, node: fx.Node) -> None:
        """Read a value in a layout that depends on its own."""
        (source,) = node.all_input_nodes
        layout = self.given.relative[node](self.home(source).reduced(), self.sizes)
        self._take(source, layout, node)
        ranks = self.ranks[source]
        self._record(node, layout, {a: ranks.get(a, DERIVED) for a in layout.split_axes})

    def _choose(self, node: fx.Node) -> None:
        call = Call.of(node)
        rule = rule_of(call)
        homes = [self.home(o) for o in call.operands]
        if self.take_apart is not None and self._comes_apart(node, homes):
            return
        wished = list(self.asked.get(node, ()))
        if node in self.wishes:
            wished.append(self.wishes[node])
        wished += self._brought_back(node, call, homes)
        local = self.given.local.get(node)
        possible = options if local is None else local.options
        if node.target in (enter, again, leave):
            option = self._carried(node, lambda x: possible(rule, [x] * len(homes), [x], self.sizes))
        else:
            candidates = possible(rule, homes, wished, self.sizes)
            alone = len(candidates) == 1
            option = candidates[0] if alone else self._best(node, call, homes, candidates)
        for operand, layout in zip(call.operands, option.ins, strict=True):
            self._take(operand, layout, node)
        self.decision.option[node] = option
        if self.spread is not None:
            self._remember(node, call, homes, option)
        self.decision.raw[node] = option.outs
        rate = seconds_per_point(node, self.given.machine)
        self.decision.work += option.cost(self.sizes).work * rate
        self.decision.bytes += self._exchanged(call, option)
        ranks = self._ranks_of(call, homes, option)
        if isinstance(VAL.of(node), (tuple, list)):
            self.ranks[node] = ranks
        else:
            self._resolve(node, option.outs[0], ranks)

    def _carried(self, node: fx.Node, possible: Callable[[Layout], Sequence[Option]]) -> Option:
        """The option for a carry, whose layout is the same in all iterations and on exit."""
        operands = Call.of(node).operands
        if node.target is again:
            self.handed[operands[1]] = self.home(operands[0]).reduced()
        if node.target is enter:
            layouts = [*self._layouts_of_carry(node), Layout.replicated(Call.of(node).outs[0])]
        else:
            layouts = [self.home(operands[-1])]
        known = ((layout, option) for layout in layouts for option in possible(layout))
        return next(option for layout, option in known if option.outs == (layout,))

    def _layouts_of_carry(self, node: fx.Node) -> list[Layout]:
        """The layouts that a carry may have, the cheapest first: on entry, in use, and on exit."""
        (first,) = Call.of(node).operands
        home, handed = self.home(first).reduced(), self.start.handed.get(node)
        wanted = dict.fromkeys(want.reduced() for want in self.needed.get(node, {}).values())
        table = self.table

        def key(layout: Layout) -> tuple[int, float]:
            lost = math.prod(table[axis] for axis in {*home.split_axes}.difference(layout.split_axes))
            moved = sum(cost(layout, want, self.sizes) for want in wanted)
            if handed is not None:
                moved += cost(handed, layout, self.sizes)
            return lost, self._cost(first, layout) + moved * _bytes_each(node, 0)

        return sorted(dict.fromkeys([home, *([handed] if handed else []), *wanted]), key=key)

    def _brought_back(
        self, node: fx.Node, call: Call, homes: Sequence[Layout]
    ) -> list[Layout]:
        """A layout with the operands' lost axes restored, if these axes are to be restored.

        Constants and unsplit parameters have lost no axes; they are available in any layout.
        """
        if self.spread is None:
            return []
        had = frozenset[str]().union(*(self.had.get(operand, ()) for operand in call.operands))
        free = self.given.spread & had.difference(*(home.split_axes for home in homes))
        layout = self.spread.layout(node, free) if free else None
        return [] if layout is None else [layout]

    def _remember(
        self, node: fx.Node, call: Call, homes: Sequence[Layout], option: Option
    ) -> None:
        """Record the axes of a result's operands: those that still split the result, and those lost.

        An axis that splits a contraction on both sides (the batch in a weight's gradient, hidden units
        between two split weights) has split its work: after the sum over it, it does not count as lost.
        """
        split = [home.split_axes for home in homes]
        had = frozenset[str]().union(*(self.had.get(operand, ()) for operand in call.operands), *split)
        reduced = {a for f in option.rule.combiner for a in option.axes[f]}
        self.had[node] = had - {a for a in reduced if sum(a in axes for axes in split) > 1}

    def _comes_apart(self, node: fx.Node, homes: Sequence[Layout]) -> bool:
        """Decompose a node if its operands' layouts require this; the new nodes are visited next."""
        assert self.take_apart is not None
        items = [user for user in node.users if user.target is operator.getitem]
        pieces = self.take_apart(node, homes)
        if not pieces:
            return False
        self.replaced.update([node, *items])
        self.values = output_values(self.graph)
        for piece in pieces:
            self._visit(piece)
        return True

    def _best(
        self, node: fx.Node, call: Call, homes: Sequence[Layout], candidates: Sequence[Option]
    ) -> Option:
        least = min(option.cost(self.sizes).volume for option in candidates)
        for option in candidates:
            if option.ins == tuple(homes) and option.cost(self.sizes).volume == least:
                lost, missed, moved, wire, _ = self._key(node, call, homes, option)
                if lost == 1 and not (missed or any(moved) or wire):
                    return option  # no shard is moved: nothing can be better
        return min(candidates, key=lambda option: self._key(node, call, homes, option))

    def _ranks_of(
        self, call: Call, homes: Sequence[Layout], option: Option
    ) -> dict[str, int]:
        """The rank of each shard of a result: the best rank among the operands' shards it comes from."""
        ranks: dict[str, int] = {}
        for axis in {a for out in option.outs for a in out.split_axes}:
            ranks[axis] = min(
                (
                    self.ranks[o].get(axis, DERIVED)
                    for o, home, layout in zip(call.operands, homes, option.ins, strict=True)
                    if axis in home.split_axes and home.dim_of(axis) == layout.dim_of(axis)
                ),
                default=DERIVED,
            )
        return ranks

    def _key(
        self, node: fx.Node, call: Call, homes: Sequence[Layout], option: Option
    ) -> tuple[int, int, tuple[int, ...], float, int]:
        known = option.cost(self.sizes)
        brought = {a for home in homes for a in home.split_axes}
        lost = math.prod(self.table[a] for a in brought - known.split)
        moved = [0] * (DERIVED + 1)
        wire = 0.0
        for operand, home, layout in zip(call.operands, homes, option.ins, strict=True):
            cost = self._cost(operand, layout)
            wire += cost
            if cost > 0:
                for axis in home.split_axes:
                    if home.dim_of(axis) != layout.dim_of(axis):
                        moved[self.ranks[operand].get(axis, DERIVED)] += 1
        wire += self._exchanged(call, option) + self._onward(node, option)
        if node.target is rows:  # equal bytes tie, so the smallest result wins: scattered rows
            wire = round(wire)
        return lost, self._missed(node, option), tuple(moved), wire, known.volume

    def _exchanged(self, call: Call, option: Option) -> float:
        """The bytes that the operation itself sends."""
        moved = option.cost(self.sizes).exchanged
        return float(moved * _bytes_each(call.node, 0, call.operands[0])) if moved else 0.0

    def _missed(self, node: fx.Node, option: Option) -> int:
        """The number of axes that the preferred layout splits and this option splits differently."""
        wish = self.wishes.get(node)
        if wish is None or not option.outs:
            return 0
        out = option.outs[0]
        return sum(
            out.dim_of(a) is not None and out.dim_of(a) != wish.dim_of(a) for a in wish.split_axes
        )

    def _onward(self, node: fx.Node, option: Option) -> float:
        """The bytes from the results to the preferred layouts; a pending sum costs a psum_scatter."""
        total = 0.0
        wanted = dict.fromkeys(self.needed.get(node, {}).values())
        for i, out in enumerate(option.outs):
            item = _bytes_each(node, i)
            if i == 0 and wanted:
                total += item * sum(self._onward_cost(out, want) for want in wanted)
            elif out.awaited:
                k = math.prod(self.table[a] for a in out.awaited)
                total += item * out.largest_local(self.table) * (k - 1) / k
        return total

    def _onward_cost(self, out: Layout, want: Layout) -> float:
        if set(want.pending) <= set(out.pending):
            return cost(out, want, self.sizes)
        return cost(out, want.reduced(), self.sizes)

    # -- values ---------------------------------------------------------------------------------

    def _resolve(self, node: fx.Node, raw: Layout, ranks: dict[str, int]) -> None:
        """Reduce a pending value with several users once, into the layout that suits them best."""
        if isinstance(VAL.of(node), (tuple, list)) or not raw.awaited or _uses(node) == 1:
            self._record(node, raw, ranks)
            return
        wanted = dict.fromkeys(w.reduced() for w in self.needed.get(node, {}).values())
        whole = raw.reduced()
        best = min(
            dict.fromkeys([whole, *wanted]),
            key=lambda layout: (
                cost(raw, layout, self.sizes)
                + sum(cost(layout, want, self.sizes) for want in wanted)
            ),
        )
        self.decision.bytes += cost(raw, best, self.sizes) * _bytes_each(node, 0)
        kept = {a: r for a, r in ranks.items() if best.dim_of(a) == raw.dim_of(a)}
        self._record(node, best, {a: kept.get(a, DERIVED) for a in best.split_axes})

    def _cost(self, node: fx.Node, want: Layout) -> float:
        """The bytes to reshard a value to a layout from its cheapest available version."""
        if want in self.versions[node]:
            return 0.0
        base = self._base(node, want)
        if base is not None:
            return self._cost(*base)
        return (
            min(
                cost(have, want, self.sizes)
                for have in self.versions[node]
                if set(want.pending) <= set(have.pending)
            )
            * _bytes_each(node, 0)
        )

    def _base(self, node: fx.Node, want: Layout) -> tuple[fx.Node, Layout] | None:
        """A view's base and its layout, if the base can be resharded instead, for all its aliases."""
        if not is_alias(node) or node.target is operator.getitem:
            return None
        base = node.all_input_nodes[0]
        layout = pull(node, want, self.sizes)
        if layout is None or not set(layout.pending) <= set(self.home(base).pending):
            return None
        return base, layout

    def _take(self, node: fx.Node, want: Layout, user: fx.Node) -> None:
        """Read a value in a layout: record the need, add the reshard's cost, keep the new version."""
        self.home(node)
        self.needs.setdefault(node, {})[user] = want
        if want in self.versions[node]:
            return
        self.decision.bytes += self._cost(node, want)
        self._keep(node, want, user)

    def _keep(self, node: fx.Node, want: Layout, user: fx.Node) -> None:
        base = self._base(node, want)
        if base is not None and base[1] not in self.versions[base[0]]:
            self.needs.setdefault(base[0], {})[node] = base[1]
            self._keep(*base, user)
        self.versions[node][want] = None


def _bytes_each(node: fx.Node, result: int, of: fx.Node | None = None) -> int:
    """The bytes of an element of a node's result, or `of` an operand's, in all iterations."""
    val = VAL.of(of or node)
    if isinstance(val, (tuple, list)):
        val = [v for v in val if hasattr(v, "shape")][result]
    return int(val.dtype.itemsize) * times(node)


def _uses(node: fx.Node) -> int:
    """The number of operations that use a value, directly or through aliases."""
    return sum(_uses(user) if is_alias(user) else 1 for user in node.users)
