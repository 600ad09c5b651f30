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
from typing import NamedTuple

from torch import fx

from torchard.functional.machines.machine import Machine
from torchard.functional.programs.graphs import output_node, output_values
from torchard.functional.programs.loops import times
from torchard.functional.programs.markers import again, enter, leave, rows
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.factors import Rule
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.options import Option, options
from torchard.sharding.layouts.reshard import cost
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.planning.decision import (
    BATCH,
    CONSTRAINT,
    DERIVED,
    Given,
    LayoutDecision,
    seconds_per_point,
)
from torchard.sharding.planning.propagation.best import (
    ReadValue,
    ResultBytes,
    best,
    moved_base,
    sent,
)
from torchard.sharding.planning.propagation.stakes import Spread
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import results

__all__ = ["Needs", "NodeFacts", "Start", "Sweep", "TakeApart"]

Needs = dict[fx.Node, dict[fx.Node, Layout]]  # value -> user -> layout as read
TakeApart = Callable[[fx.Node, Sequence[Layout]], list[fx.Node]]


class NodeFact(NamedTuple):
    """What no sweep changes about a node.

    Attributes:
        size: bytes of an element, in all iterations; 0 if it is no tensor.
        view, base: the rule of a view, and the value that it is a view of.
        rate: seconds of a point of its iteration space.
    """

    size: int
    view: Rule | None
    base: fx.Node | None
    rate: float
    results: ResultBytes


class NodeFacts:
    """What no sweep changes, by node."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._known: dict[fx.Node, NodeFact] = {}

    def of(self, node: fx.Node) -> NodeFact:
        fact = self._known.get(node)
        if fact is None:
            fact = self._known[node] = self._found(node)
        return fact

    def _found(self, node: fx.Node) -> NodeFact:
        sizes = tuple([value.dtype.itemsize * times(node) for value in results(node)])
        size = sizes[0] if len(sizes) == 1 else 0
        if node.op != "call_function" or node.target is operator.getitem:
            return NodeFact(size, None, None, 0.0, ResultBytes((), 0, False))
        call, rate = Call.of(node), seconds_per_point(node, self.machine)
        first = VAL.of(call.operands[0]).dtype.itemsize * times(node) if call.operands else 0
        known = ResultBytes(sizes, first, node.target is rows)
        if is_alias(node):
            return NodeFact(size, rule_of(call), node.all_input_nodes[0], rate, known)
        return NodeFact(size, None, None, rate, known)


@dataclass(frozen=True)
class Start:
    """The results of earlier sweeps.

    Attributes:
        facts: what no sweep changes.
        wishes: for values before a constraint, the layout that the constraint prefers.
        asked: the layouts in which consumers read values, in any sweep.
        needs: the layouts in which consumers read values in the last sweep.
        handed: for each carry of a loop, the layout in which the last sweep computed its next value.
    """

    facts: NodeFacts
    wishes: dict[fx.Node, Layout]
    asked: dict[fx.Node, dict[Layout, None]]
    needs: Needs
    handed: dict[fx.Node, Layout]

    def after(self, needs: Needs, handed: dict[fx.Node, Layout]) -> Start:
        """These results, updated with the results of one more sweep."""
        asked = self.asked
        for node, by_user in needs.items():
            asked.setdefault(node, {}).update(dict.fromkeys(by_user.values()))
        return Start(self.facts, self.wishes, asked, needs, handed)


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
        self.reads: dict[fx.Node, ReadValue] = {}
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
        """Read a value in the cheapest allowed layout that is near its own, or near a wanted one."""
        (source,) = node.all_input_nodes
        wanted = dict.fromkeys(w.reduced() for w in self.needed.get(node, {}).values())
        near = (self.home(source).reduced(), *wanted)
        read, item = self._read(source), self.start.facts.of(node).size
        layout = min(
            dict.fromkeys(self.given.relative[node](x, self.sizes) for x in near),
            key=lambda x: (
                sent(read, x, self.sizes) + item * sum(cost(x, want, self.sizes) for want in wanted)
            ),
        )
        self._take(source, layout, node)
        # What the node itself splits has its precedence, all other shards have that of the value.
        home, had, own = self.home(source), self.ranks[source], self.given.ranks.get(node, DERIVED)
        kept = {a: r for a, r in had.items() if home.dim_of(a) == layout.dim_of(a)}
        self.had[node] = self.had.get(source, frozenset()).union(home.split_axes)
        self._record(node, layout, {a: kept.get(a, own) for a in layout.split_axes})

    def _choose(self, node: fx.Node) -> None:
        call = Call.of(node)
        rule = rule_of(call)
        reads = tuple([self._read(o) for o in call.operands])
        homes = [read.home for read in reads]
        if self.take_apart is not None and self._comes_apart(node, homes):
            return
        wished = list(self.asked.get(node, ()))
        if node in self.wishes:
            wished.append(self.wishes[node])
        wished += self._brought_back(node, call, homes)
        local = self.given.local.get(node)
        possible = options if local is None else local.options
        if node.target in (enter, again, leave):
            carried = self._carried(node, lambda x: possible(rule, [x] * len(homes), [x], self.sizes))
            candidates: tuple[Option, ...] = (carried,)
        else:
            candidates = possible(rule, homes, wished, self.sizes)
        wanted = tuple(dict.fromkeys(self.needed.get(node, {}).values()))
        fact = self.start.facts.of(node)
        wish = self.wishes.get(node)
        option, ranks = best(candidates, reads, wanted, wish, fact.results, self.sizes)
        for operand, layout in zip(call.operands, option.ins, strict=True):
            self._take(operand, layout, node)
        self.decision.option[node] = option
        if self.spread is not None:
            self._remember(node, call, homes, option)
        self.decision.raw[node] = option.outs
        known = option.cost(self.sizes)
        self.decision.work += known.work * fact.rate
        self.decision.bytes += float(known.exchanged * fact.results.exchanged)
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
            entered = sent(self._read(first), layout, self.sizes)
            return lost, entered + moved * self.start.facts.of(node).size

        # Readers want what the last sweep gave them, so that costs may be equal.
        begins = [home] if handed is None else [home, handed]
        self.decision.tied |= len({*begins}) > len({*map(key, begins)})
        if self.given.handed_first:
            begins.reverse()
        return sorted(dict.fromkeys([*begins, *wanted]), key=key)

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

    # -- values ---------------------------------------------------------------------------------

    def _resolve(self, node: fx.Node, raw: Layout, ranks: dict[str, int]) -> None:
        """Reduce a pending value with several users once, into the layout that suits them best."""
        if isinstance(VAL.of(node), (tuple, list)) or not raw.awaited or _uses(node) == 1:
            self._record(node, raw, ranks)
            return
        wanted = dict.fromkeys(w.reduced() for w in self.needed.get(node, {}).values())
        whole = raw.reduced()
        home = min(
            dict.fromkeys([whole, *wanted]),
            key=lambda layout: (
                cost(raw, layout, self.sizes)
                + sum(cost(layout, want, self.sizes) for want in wanted)
            ),
        )
        self.decision.bytes += cost(raw, home, self.sizes) * self.start.facts.of(node).size
        kept = {a: r for a, r in ranks.items() if home.dim_of(a) == raw.dim_of(a)}
        self._record(node, home, {a: kept.get(a, DERIVED) for a in home.split_axes})

    def _read(self, node: fx.Node) -> ReadValue:
        """A value as the next operation finds it."""
        if node not in self.versions:
            self.home(node)
        fact = self.start.facts.of(node)
        base = None if fact.base is None else self._read(fact.base)
        versions, known = self.versions[node], self.reads.get(node)
        if known is None or len(known.versions) < len(versions) or known.base is not base:
            ranks = tuple(self.ranks[node].items())
            known = ReadValue(tuple(versions), ranks, fact.size, fact.view, base)
            self.reads[node] = known
        return known

    def _take(self, node: fx.Node, want: Layout, user: fx.Node) -> None:
        """Read a value in a layout: record the need, add the reshard's cost, keep the new version."""
        self.needs.setdefault(node, {})[user] = want
        if want not in (read := self._read(node)).versions:
            self.decision.bytes += sent(read, want, self.sizes)
            self._keep(node, want)

    def _keep(self, node: fx.Node, want: Layout) -> None:
        layout = moved_base(self._read(node), want, self.sizes)
        if layout is not None:
            base = node.all_input_nodes[0]
            if layout not in self.versions[base]:
                self.needs.setdefault(base, {})[node] = layout
                self._keep(base, layout)
        self.versions[node][want] = None


def _uses(node: fx.Node) -> int:
    """The number of operations that use a value, directly or through aliases."""
    return sum(_uses(user) if is_alias(user) else 1 for user in node.users)
