"""Operations that come apart, beside their decompositions: a decision takes the one or the other.

A value may have several versions: that of its own operation, and those of decompositions. One of them is
taken. Operations that no taken version needs are off: they cost nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from torchard.functional.programs.tags import VAL
from torchard.sharding.decompositions.decompose import (
    beside,
    comes_apart,
    is_of_neighbours,
    stand_in,
)
from torchard.sharding.decompositions.functional_forms import BIASED_PRODUCTS
from torchard.sharding.decompositions.neighbours import Parts
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.planning.decision import Given, LayoutDecision
from torchard.sharding.planning.minimum.elimination import Table
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import result_index

__all__ = [
    "NONE",
    "Alternatives",
    "Place",
    "States",
    "index_of",
    "settled",
    "source_of",
    "values_of",
    "with_alternatives",
]


@dataclass(frozen=True)
class Alternatives:
    """The versions of values.

    Attributes:
        versions: by value that has several: all of them, its own first.
        of: by version: the value.
        pieces: the operations of all decompositions.
        optional: these, and those that they may take the place of.
    """

    versions: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    pieces: set[fx.Node] = field(default_factory=set)
    optional: set[fx.Node] = field(default_factory=set)

    def value(self, node: fx.Node) -> fx.Node:
        """The value of which a node is a version."""
        return self.of.get(node, node)

    def on(self, graph: fx.Graph, taken: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
        """The nodes that are needed, if some values' versions are taken in place of their own."""
        found = {node for node in graph.nodes if source_of(node) not in self.optional}
        waiting = [*found]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                value = self.value(source)
                node = taken.get(value, value)
                if node not in found:
                    found.add(node)
                    waiting.append(node)
        return found

    def add(self, pairs: Mapping[fx.Node, fx.Node], pieces: Sequence[fx.Node]) -> None:
        """Add a decomposition: what it computes in the place of some values, and its operations."""
        for node, version in pairs.items():
            value = self.value(node)
            self.of.update({value: value, version: value})
            self.versions[value] = (*self.versions.get(value, (value,)), version)
            self.optional.add(source_of(node))
        self.pieces.update(pieces)
        self.optional.update(pieces)


NONE = Alternatives()


Place = tuple[Layout, Layout]
"""Where a value is: at home, and moved from there into a second layout, or the same one."""


@dataclass(frozen=True)
class States:
    """The states of a value: its places, for one version after another; and off, if it may be."""

    places: tuple[Place, ...]
    versions: int
    may_be_off: bool

    @functools.cached_property
    def homes(self) -> tuple[Layout, ...]:
        """The first layout in each place."""
        return tuple(home for home, _ in self.places)

    @functools.cached_property
    def kept(self) -> tuple[Layout, ...]:
        """The second layout in each place."""
        return tuple(kept for _, kept in self.places)

    @property
    def count(self) -> int:
        """The number of states."""
        return len(self.places) * self.versions + self.may_be_off

    @property
    def plain(self) -> bool:
        """Whether each state is a place."""
        return self.versions == 1 and not self.may_be_off

    def index(self, place: Place, version: int) -> int:
        """The state of a version in a place."""
        return version * len(self.places) + self.places.index(place)

    def place(self, state: int) -> Place | None:
        """The place in a state; None if the value is off."""
        off = state == len(self.places) * self.versions
        return None if off else self.places[state % len(self.places)]

    def version(self, state: int) -> int:
        """The version in a state."""
        return state // len(self.places)

    def other_versions(self, state: int) -> list[int]:
        """The states of all other versions in the place of a state."""
        return [s for s in range(state % len(self.places), self.count, len(self.places)) if s != state]

    def read(self, costs: Table, may_be_off: bool = False) -> Table:
        """What it costs a user to read the value, by state and option, from costs by place.

        Args:
            may_be_off: whether the user's last state is to be off, in which it reads nothing.
        """
        wide = np.tile(costs, (self.versions, 1))
        if self.may_be_off:
            wide = np.pad(wide, ((0, 1), (0, 0)), constant_values=np.inf)
        return np.pad(wide, ((0, 0), (0, 1))) if may_be_off else wide

    def computed(self, costs: Table, version: int) -> Table:
        """What it costs to compute a version, by option (off last) and state, from costs by place."""
        ours = slice(version * len(self.places), (version + 1) * len(self.places))
        wide = np.full((len(costs) + 1, self.count), np.inf)
        wide[:-1, ours] = costs
        wide[-1] = 0.0
        wide[-1, ours] = np.inf
        return wide


def with_alternatives(
    graph: fx.Graph, given: Given, sizes: Sizes, axes: Sequence[str]
) -> Alternatives:
    """Insert the decompositions of operations that come apart, and of those that are parts of them.

    Args:
        axes: those that may split what an operation needs whole, of which there are then blocks.
    """
    found, waiting = Alternatives(), list(graph.nodes)
    counts = [count for axis, count in sizes if axis in axes]
    while waiting:
        node = waiting.pop()
        if node not in given.local and _may_gain(node):
            waiting += _insert(graph, node, None, found)
            for parts in _blocks(node, counts):
                _insert(graph, node, parts, found)
    return found


def _insert(
    graph: fx.Graph, node: fx.Node, parts: Parts | None, found: Alternatives
) -> list[fx.Node]:
    pieces, results = beside(graph, node, parts)
    pairs = {value: results[i] for i, value in values_of(node).items() if results}
    if pairs and len({*pairs.values()} & {*pieces}) == len(pairs):
        found.add(pairs, pieces)
        return pieces
    for piece in reversed(pieces):  # a result is an operand
        graph.erase_node(piece)
    return []


def _blocks(node: fx.Node, counts: Sequence[int]) -> Iterator[Parts]:
    """All numbers of shards of the dims of operands that an operation needs whole."""
    rule = rule_of(Call.of(node))
    if not is_of_neighbours(node):
        return
    known = set[Parts]()
    for split in itertools.product((None, *sorted(rule.whole)), repeat=len(counts)):
        by_factor: dict[int | None, int] = defaultdict(lambda: 1)
        for factor, count in zip(split, counts, strict=True):
            by_factor[factor] *= 1 if factor is None else count
        parts = tuple(
            tuple(math.prod(by_factor[f] for f in dim) for dim in dims) for dims in rule.ins
        )
        if any(n > 1 for dims in parts for n in dims) and parts not in known:
            known.add(parts)
            yield parts


def _may_gain(node: fx.Node) -> bool:
    """Whether a decomposition may be split where the operation may not."""
    if node.op != "call_function" or node.target is operator.getitem or not comes_apart(node):
        return False
    return node.target in BIASED_PRODUCTS or bool(rule_of(Call.of(node)).whole)


def values_of(node: fx.Node) -> dict[int, fx.Node]:
    """The values that an operation computes, by the index of the result."""
    if isinstance(VAL.of(node), (tuple, list)):
        return {
            result_index(user): user for user in node.users if hasattr(VAL.get(user), "shape")
        }
    return {0: node}


def index_of(value: fx.Node) -> int:
    """The number of a value among the results of the operation that computes it."""
    return result_index(value) if value.target is operator.getitem else 0


def source_of(value: fx.Node) -> fx.Node:
    """The operation that computes a value."""
    return value.all_input_nodes[0] if value.target is operator.getitem else value


def settled(
    graph: fx.Graph, decision: LayoutDecision, alternatives: Alternatives
) -> LayoutDecision:
    """The decision, with the graph changed to contain what is on only."""
    on = alternatives.on(graph, decision.taken)
    for value, version in decision.taken.items():
        for other in alternatives.versions[value]:
            if other is not version:
                stand_in(version, other)
    for node in reversed(graph.nodes):
        if node not in on:
            graph.erase_node(node)
    return replace(
        decision,
        option={n: x for n, x in decision.option.items() if n in on},
        raw={n: x for n, x in decision.raw.items() if n in on},
        home={n: x for n, x in decision.home.items() if n in on},
        kept={decision.taken.get(n, n): x for n, x in decision.kept.items()},
        taken={},
    )
