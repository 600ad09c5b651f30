"""Propagation: which axis splits which factor of every operation of a joint program.

Each operation takes the best of its options (``options.py``), compared in this order:

1. parallelism lost: an axis along which an operand is split, and the operation no longer;
2. a constraint downstream that would be missed;
3. shards moved, by the rank of what they stem from: batch inputs before parameters before constraints
   before derived values. A shard that is at hand in the wanted layout already is not moved;
4. bytes on the wire, from the cheapest version of each operand to the layouts consumers asked for;
5. elements of the local results.

Bytes alone are degenerate: they gather token ids and small weights and replicate all compute. Sweeps
repeat with the layouts that consumers asked for as further options for their producers, and the
cheapest sweep is kept. Nothing outside this file knows how the choice is made.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from torchard.sharding.aliases import is_alias, output_node, output_values, pull
from torchard.sharding.layout import Layout, Sizes
from torchard.sharding.local import Local
from torchard.sharding.options import Option, atomic, factor_axes, image, options
from torchard.sharding.reshard import cost
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import result_index

__all__ = ["BATCH", "CONSTRAINT", "DERIVED", "PARAMETER", "SWEEPS", "Decision", "Given", "propagate"]

BATCH, PARAMETER, CONSTRAINT, DERIVED = range(4)
SWEEPS = 4
_POINTS_PER_BYTE = 32.0


@dataclass(frozen=True)
class Given:
    """What is fixed from outside.

    Attributes:
        inputs: the layout and rank of each placeholder; of a cotangent, the index of its output.
        outputs: the layout each output must have; None leaves it open.
        pins: the layouts that constraints give their nodes.
        ranks: of the shards that pins make.
        local: operations on local values (manual mode), and what of them is not to be chosen.
    """

    inputs: dict[fx.Node, tuple[Layout, int] | int]
    outputs: tuple[Layout | None, ...]
    pins: dict[fx.Node, Layout] = field(default_factory=dict)
    ranks: dict[fx.Node, int] = field(default_factory=dict)
    local: dict[fx.Node, Local] = field(default_factory=dict)


@dataclass
class Decision:
    """What propagation found.

    Attributes:
        option: for every operation.
        raw: the layouts of its results as computed.
        home: the layout of each value where its consumers find it (``raw``, its pending sums
            resolved if several want them).
        outputs: the layout of each output.
        bytes: on the wire per rank.
    """

    option: dict[fx.Node, Option] = field(default_factory=dict)
    raw: dict[fx.Node, tuple[Layout, ...]] = field(default_factory=dict)
    home: dict[fx.Node, Layout] = field(default_factory=dict)
    outputs: tuple[Layout, ...] = ()
    bytes: float = 0.0
    work: float = 0.0

    @property
    def total(self) -> float:
        return self.bytes + self.work / _POINTS_PER_BYTE


def propagate(graph: fx.Graph, given: Given, sizes: Sizes, sweeps: int = SWEEPS) -> Decision:
    """Decide the layout of every value of a program, in some sweeps at most."""
    wishes = _wishes(graph, given, sizes)
    asked: dict[fx.Node, dict[Layout, None]] = {}
    needs = _output_needs(graph, given)
    best: Decision | None = None
    for _ in range(sweeps):
        sweep = _Sweep(graph, given, sizes, wishes, asked, needs)
        decision = sweep.run()
        if best is None or decision.total < best.total:
            best = decision
        if sweep.needs == needs:
            break
        needs = sweep.needs
        for node, by_user in needs.items():
            asked.setdefault(node, {}).update(dict.fromkeys(by_user.values()))
    assert best is not None
    return best


Needs = dict[fx.Node, dict[fx.Node, Layout]]


def _output_needs(graph: fx.Graph, given: Given) -> Needs:
    needs: Needs = {}
    out = output_node(graph)
    for value, layout in zip(output_values(graph), given.outputs, strict=True):
        if isinstance(value, fx.Node) and layout is not None:
            needs.setdefault(value, {})[out] = layout
    return needs


def _wishes(graph: fx.Graph, given: Given, sizes: Sizes) -> dict[fx.Node, Layout]:
    """What constraints ask of the values they are made of, carried back to the last reduction."""
    wishes: dict[fx.Node, Layout] = {}
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        if node in given.pins:
            (source,) = node.all_input_nodes
            wishes.setdefault(source, given.pins[node])
        elif node in wishes and node.target is not operator.getitem:
            _carry_back(node, wishes, sizes)
    return wishes


def _carry_back(node: fx.Node, wishes: dict[fx.Node, Layout], sizes: Sizes) -> None:
    call = Call.of(node)
    rule = rule_of(call)
    if len(call.outs) != 1 or rule.combine or rule.whole:
        return
    rule = atomic(rule, [], [wishes[node]], sizes)
    found = factor_axes(rule, rule.outs[0], wishes[node], sizes)
    axes = [found.get(f, ()) for f in range(len(rule.sizes))]
    for operand, dims in zip(call.operands, rule.ins, strict=True):
        on = {f for d in dims for f in d}
        if all(f in on for f in found):
            wishes.setdefault(operand, image(dims, rule, axes, (), sizes))


class _Sweep:
    """One pass over the graph, in order."""

    def __init__(
        self,
        graph: fx.Graph,
        given: Given,
        sizes: Sizes,
        wishes: dict[fx.Node, Layout],
        asked: dict[fx.Node, dict[Layout, None]],
        needs: Needs,
    ) -> None:
        self.graph, self.given, self.sizes = graph, given, sizes
        self.table = dict(sizes)
        self.wishes, self.asked, self.needed = wishes, asked, needs
        self.needs: Needs = _output_needs(graph, given)
        self.versions: dict[fx.Node, dict[Layout, None]] = {}
        self.ranks: dict[fx.Node, dict[str, int]] = {}
        self.decision = Decision()
        self.values = output_values(graph)
        self.open: dict[int, Layout] = {}

    def run(self) -> Decision:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                given = self.given.inputs[node]
                if not isinstance(given, int):
                    self._settle(node, given[0], {a: given[1] for a in given[0].split_axes})
            elif node.op == "call_function":
                self._visit(node)
        out = output_node(self.graph)
        layouts = [self._output(i) for i in range(len(self.values))]
        for value, layout in zip(self.values, layouts, strict=True):
            if isinstance(value, fx.Node):
                self._take(value, layout, out)
        self.decision.outputs = tuple(layouts)
        return self.decision

    def home(self, node: fx.Node) -> Layout:
        """The layout a value has; of a cotangent, what its output got."""
        known = self.decision.home.get(node)
        if known is not None:
            return known
        tied = self.given.inputs[node]
        assert isinstance(tied, int)
        layout = self._output(tied)
        source = self.values[tied]
        ranks = self.ranks.get(source, {}) if isinstance(source, fx.Node) else {}
        self._settle(node, layout, {a: ranks.get(a, DERIVED) for a in layout.split_axes})
        return layout

    def _output(self, i: int) -> Layout:
        """The layout of an output: as asked, else as found, without pending sums."""
        if i not in self.open:
            asked, value = self.given.outputs[i], self.values[i]
            if asked is None:
                asked = (
                    self.home(value).reduced()
                    if isinstance(value, fx.Node)
                    else Layout.replicated(())
                )
            self.open[i] = asked
        return self.open[i]

    def _settle(self, node: fx.Node, layout: Layout, ranks: dict[str, int]) -> None:
        self.decision.home[node] = layout
        self.versions[node] = {layout: None}
        self.ranks[node] = ranks

    # -- one node -------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._getitem(node)
        elif node in self.given.pins:
            self._pin(node)
        else:
            self._choose(node)

    def _getitem(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if not hasattr(node.meta.get("val"), "shape"):
            return
        raw = self.decision.raw[source][result_index(node)]
        ranks = {a: r for a, r in self.ranks[source].items() if a in raw.split_axes}
        self._resolve(node, raw, ranks)

    def _pin(self, node: fx.Node) -> None:
        layout = self.given.pins[node]
        (source,) = node.all_input_nodes
        self._take(source, layout, node)
        rank = self.given.ranks.get(node, CONSTRAINT)
        # A batch that is pinned as it was split remains one: no parameter goes before it.
        home, had = self.home(source), self.ranks[source]
        batch = {a for a in had if had[a] == BATCH and home.dim_of(a) == layout.dim_of(a)}
        self._settle(node, layout, {a: BATCH if a in batch else rank for a in layout.split_axes})

    def _choose(self, node: fx.Node) -> None:
        call = Call.of(node)
        rule = rule_of(call)
        homes = [self.home(o) for o in call.operands]
        wished = list(self.asked.get(node, ()))
        if node in self.wishes:
            wished.append(self.wishes[node])
        local = self.given.local.get(node)
        possible = options if local is None else local.options
        candidates = possible(rule, homes, wished, self.sizes)
        option = candidates[0] if len(candidates) == 1 else self._best(node, call, homes, candidates)
        for operand, layout in zip(call.operands, option.ins, strict=True):
            self._take(operand, layout, node)
        self.decision.option[node] = option
        self.decision.raw[node] = option.outs
        if not is_alias(node):
            self.decision.work += option.cost(self.sizes).work
        self.decision.bytes += self._exchanged(call, option)
        ranks = self._ranks_of(call, homes, option)
        if isinstance(node.meta["val"], (tuple, list)):
            self.ranks[node] = ranks
        else:
            self._resolve(node, option.outs[0], ranks)

    def _best(
        self, node: fx.Node, call: Call, homes: Sequence[Layout], candidates: Sequence[Option]
    ) -> Option:
        least = min(option.cost(self.sizes).volume for option in candidates)
        for option in candidates:
            if option.ins == tuple(homes) and option.cost(self.sizes).volume == least:
                lost, missed, moved, wire, _ = self._key(node, call, homes, option)
                if lost == 1 and not (missed or any(moved) or wire):
                    return option  # as everything stands, nothing can be better
        return min(candidates, key=lambda option: self._key(node, call, homes, option))

    def _ranks_of(
        self, call: Call, homes: Sequence[Layout], option: Option
    ) -> dict[str, int]:
        """A shard of the result has the best rank among the operands' shards that survive in it."""
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
            price = self._price(operand, layout)
            wire += price
            if price > 0:
                for axis in home.split_axes:
                    if home.dim_of(axis) != layout.dim_of(axis):
                        moved[self.ranks[operand].get(axis, DERIVED)] += 1
        wire += self._exchanged(call, option) + self._onward(node, option)
        return lost, self._missed(node, option), tuple(moved), wire, known.volume

    def _exchanged(self, call: Call, option: Option) -> float:
        """Bytes that the operation itself moves."""
        moved = option.cost(self.sizes).exchanged
        return float(moved * _itemsize(call.operands[0], 0)) if moved else 0.0

    def _missed(self, node: fx.Node, option: Option) -> int:
        """Axes that a wished layout splits, and this option splits otherwise."""
        wish = self.wishes.get(node)
        if wish is None or not option.outs:
            return 0
        out = option.outs[0]
        return sum(
            out.dim_of(a) is not None and out.dim_of(a) != wish.dim_of(a) for a in wish.split_axes
        )

    def _onward(self, node: fx.Node, option: Option) -> float:
        """Bytes from the results to what consumers asked for; a pending sum costs a scatter."""
        total = 0.0
        wanted = dict.fromkeys(self.needed.get(node, {}).values())
        for i, out in enumerate(option.outs):
            item = _itemsize(node, i)
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
        """A pending value that several want is reduced once, into the layout that suits them."""
        if isinstance(node.meta["val"], (tuple, list)) or not raw.awaited or _uses(node) == 1:
            self._settle(node, raw, ranks)
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
        self.decision.bytes += cost(raw, best, self.sizes) * _itemsize(node, 0)
        kept = {a: r for a, r in ranks.items() if best.dim_of(a) == raw.dim_of(a)}
        self._settle(node, best, {a: kept.get(a, DERIVED) for a in best.split_axes})

    def _price(self, node: fx.Node, want: Layout) -> float:
        """Bytes on the wire to have a value in a layout, from the cheapest version there is."""
        if want in self.versions[node]:
            return 0.0
        base = self._base(node, want)
        if base is not None:
            return self._price(*base)
        return min(
            cost(have, want, self.sizes)
            for have in self.versions[node]
            if set(want.pending) <= set(have.pending)
        ) * _itemsize(node, 0)

    def _base(self, node: fx.Node, want: Layout) -> tuple[fx.Node, Layout] | None:
        """Where to move a view instead: at its base, so that every alias shares the move."""
        if not is_alias(node) or node.target is operator.getitem:
            return None
        base = node.all_input_nodes[0]
        layout = pull(node, want, self.sizes)
        if layout is None or not set(layout.pending) <= set(self.home(base).pending):
            return None
        return base, layout

    def _take(self, node: fx.Node, want: Layout, user: fx.Node) -> None:
        """Use a value in a layout: remember the need, pay for the move, keep the version."""
        self.home(node)
        self.needs.setdefault(node, {})[user] = want
        if want in self.versions[node]:
            return
        self.decision.bytes += self._price(node, want)
        self._keep(node, want, user)

    def _keep(self, node: fx.Node, want: Layout, user: fx.Node) -> None:
        base = self._base(node, want)
        if base is not None and base[1] not in self.versions[base[0]]:
            self.needs.setdefault(base[0], {})[node] = base[1]
            self._keep(*base, user)
        self.versions[node][want] = None


def _itemsize(node: fx.Node, result: int) -> int:
    val = node.meta["val"]
    if isinstance(val, (tuple, list)):
        val = [v for v in val if hasattr(v, "shape")][result]
    return int(val.dtype.itemsize)


def _uses(node: fx.Node) -> int:
    """How many operations use a value, counted through its aliases."""
    return sum(_uses(user) if is_alias(user) else 1 for user in node.users)
