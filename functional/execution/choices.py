"""Conditionals in what runs: a selection of which only the chosen operand is computed.

In a lowered program the operations of all branches are in the graph, and `chosen` selects among their
results. `outlined` finds what only one operand of a selection depends on, and puts these operations in a
block; of the blocks of a `Conditional` one runs. It relies on nothing but the graph: what anything else
reads is computed in any case.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import fx

from torchard.functional.effects.unused_results import may_have_effects
from torchard.functional.programs.graphs import extracted
from torchard.functional.programs.loops import ordered, regrouped
from torchard.functional.programs.markers import Effect, chosen, is_marker, taken
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import AHEAD, LOOP, VAL
from torchard.functional.programs.views import storage_of
from torchard.functional.torch_internals.operators import aten

__all__ = ["Conditional", "effects_of_branches", "outlined"]

Run = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
MakeRun = Callable[[fx.Graph], Run]
Conditions = frozenset[tuple[int, int]]


class Conditional:
    """Several blocks, one of which runs: called with an index, and the operands of all of them.

    Attributes:
        blocks: graphs with the same number of results, each in memory of its own.
        takes: for each block the positions of its operands.
    """

    __name__ = "choice"
    namespace = "torchard_branches"

    def __init__(
        self, blocks: Sequence[fx.Graph], takes: Sequence[Sequence[int]], compile: MakeRun
    ) -> None:
        self.blocks, self.takes, self.compile = blocks, takes, compile

    @cached_property
    def runs(self) -> list[Run]:
        """The blocks, compiled."""
        return [self.compile(block) for block in self.blocks]

    def __call__(self, index: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        number = taken(index)
        return tuple(self.runs[number]([operands[i] for i in self.takes[number]]))


def outlined(graph: fx.Graph, compile: MakeRun) -> fx.Graph | None:
    """The graph with a `Conditional` for its selections; None if it has none.

    Args:
        compile: makes a function of the graph of a block.
    """
    if not any(node.target is chosen for node in graph.nodes):
        return None
    return _Outlined(graph, compile).graph()


def effects_of_branches(graph: fx.Graph) -> Iterator[Effect]:
    """The effects in a graph that are performed if a branch is taken."""
    if not any(isinstance(node.target, Effect) for node in graph.nodes):
        return
    made = outlined(graph, _uncompiled)
    todo = [] if made is None else [made]
    while todo:
        for node in todo.pop().nodes:
            if isinstance(node.target, Conditional):
                todo += node.target.blocks
                for block in node.target.blocks:
                    yield from (n.target for n in block.nodes if isinstance(n.target, Effect))


@dataclass
class _Group:
    """Selections by one index, none of which depends on another.

    Attributes:
        after: as bits, the groups that a member depends on.
    """

    number: int
    index: fx.Node
    after: int = 0
    members: list[fx.Node] = field(default_factory=list)
    blocks: list[list[fx.Node]] = field(default_factory=list)


class _Outlined:
    def __init__(self, graph: fx.Graph, compile: MakeRun) -> None:
        self.old, self.compile = graph, compile
        self.of: dict[fx.Node, _Group] = {}
        self.env: dict[fx.Node, fx.Node] = {}
        self.new = type(graph)()
        self.groups = _groups(graph)
        for group in self.groups:
            self.of.update(dict.fromkeys(group.members, group))
        self.conditions = self._conditions()

    def graph(self) -> fx.Graph:
        """The graph with a choice in the place of each outermost group."""
        outer = {n for n in self.old.nodes if not self.conditions[n]}
        groups = [g for g in self.groups if any(member in outer for member in g.members)]
        for group in groups:
            group.blocks = [[] for _ in group.members[0].args[1:]]
        known = {group.number: group for group in groups}
        for node in self.old.nodes:
            for number, k in self.conditions[node]:
                if number in known:
                    known[number].blocks[k].append(node)
        done = set[int]()
        for node in self._order(outer, groups):
            of = self.of.get(node)
            if of is None:
                self.env[node] = self.new.node_copy(node, self.env.__getitem__)
            elif of.number not in done:
                done.add(of.number)
                self._choose(of)
        return self.new

    def _conditions(self) -> dict[fx.Node, Conditions]:
        """Under which choices of which groups each value is read at all; none if in any case."""
        common: dict[int, Conditions] = {}
        while True:  # until those of a group, which is one choice, are those of all its members
            found = self._found(common)
            before, common = common, {
                group.number: frozenset.intersection(*(found[member] for member in group.members))
                for group in self.groups
            }
            if common == before:
                break
        for node in self.old.nodes:  # a tuple and its items stay together
            if node.target is operator.getitem:
                found[node] = found[node.all_input_nodes[0]]
        return found

    def _found(self, common: Mapping[int, Conditions]) -> dict[fx.Node, Conditions]:
        """The conditions of each value, where those of groups are at most these."""
        found: dict[fx.Node, Conditions] = {}
        for node in reversed(self.old.nodes):
            found[node] = frozenset()
            if node.op != "call_function" or _stays(node) or not node.users:
                continue
            read = [self._read(user, node, found[user]) for user in node.users]
            group = self.of.get(node)
            if group is not None and group.number in common:
                read.append(common[group.number])
            found[node] = frozenset.intersection(*read)
        return found

    def _read(self, user: fx.Node, node: fx.Node, conditions: Conditions) -> Conditions:
        """Under which conditions a user reads a value."""
        if LOOP.get(user) is not LOOP.get(node):
            return frozenset()
        group = self.of.get(user)
        places = [k for k, value in enumerate(user.args[1:]) if value is node]
        if group is None or group.index is node or len(places) != 1:
            return conditions
        return conditions | {(group.number, places[0])}

    def _order(self, outer: set[fx.Node], groups: Sequence[_Group]) -> Iterable[fx.Node]:
        """Nodes outside of blocks, each after what it reads, and what its group reads; else as before."""
        reads: dict[Any, set[Any]] = {}

        def key(node: fx.Node) -> Any:
            group = self.of.get(node)
            return node if group is None else group.number

        for node in outer:
            if node not in self.of:
                reads[node] = {key(operand) for operand in node.all_input_nodes}
        for group in groups:
            inside = {n for block in group.blocks for n in block}
            operands = [x for n in (*inside, *group.members) for x in n.all_input_nodes]
            reads[group.number] = {key(x) for x in operands if x not in inside} - {group.number}
        place = {node: i for i, node in enumerate(self.old.nodes)}
        last = {group.number: group.members[-1] for group in groups}
        order = ordered(reads, {key: place[last.get(key, key)] for key in reads})
        return [last.get(key, key) for key in order]

    def _choose(self, group: _Group) -> None:
        """Add the choice of a group, and its results."""
        inside = {n for block in group.blocks for n in block}
        operands, takes, graphs = dict[fx.Node, int](), list[list[int]](), list[fx.Graph]()
        for k, nodes in enumerate(group.blocks):
            results = [member.args[1 + k] for member in group.members]
            read = dict.fromkeys(x for n in nodes for x in n.all_input_nodes if x not in inside)
            read |= dict.fromkeys(x for x in results if x not in inside)  # type: ignore[misc]  # nodes
            for x in read:
                operands.setdefault(x, len(operands))
            takes.append([operands[x] for x in read])
            graphs.append(_block(nodes, list(read), results))  # type: ignore[arg-type]  # nodes
        choice = Conditional(graphs, takes, self.compile)
        first = group.members[0]
        args = (self.env[group.index], *(self.env[x] for x in operands))
        call = self.new.call_function(choice, args)
        inherit(call, first, "place")
        if all(map(VAL.on, group.members)):  # not in the graph of a rank
            VAL.set(call, tuple(map(VAL.of, group.members)))
        for i, member in enumerate(group.members):
            self.env[member] = self.new.call_function(operator.getitem, (call, i))
            inherit(self.env[member], member, "value")


def _groups(graph: fx.Graph) -> list[_Group]:
    """The selections of a graph in groups: by index and loop, where no group depends on itself."""
    groups: list[_Group] = []
    latest: dict[Any, _Group] = {}
    after: dict[fx.Node, int] = {}  # as bits: the groups that a node depends on
    for loop, unit in groupby(regrouped(graph), key=LOOP.get):
        nodes = list(unit)
        for node in nodes:
            bits = 0
            for operand in node.all_input_nodes:
                bits |= after.get(operand, 0)
            if node.target is chosen:
                key = node.args[0], loop
                group = latest.get(key)
                if group is None or _needed(bits, groups) >> group.number & 1:
                    group = latest[key] = _Group(len(groups), node.all_input_nodes[0])
                    groups.append(group)
                group.members.append(node)
                group.after |= bits
                bits |= 1 << group.number
            after[node] = bits
        if loop is not None:  # what reads one value of a loop runs after all of it
            every = functools.reduce(operator.or_, (after[node] for node in nodes))
            after.update(dict.fromkeys(nodes, every))
    return groups


def _needed(bits: int, groups: Sequence[_Group]) -> int:
    """These groups, and those that they depend on: all members of a group are computed at once."""
    todo, found = bits, 0
    while todo:
        number = todo.bit_length() - 1
        found |= 1 << number
        todo = (todo | groups[number].after) & ~found
    return found


def _uncompiled(block: fx.Graph) -> Run:
    raise AssertionError("a block that was only looked at runs")


def _stays(node: fx.Node) -> bool:
    """Whether a node is no part of a block."""
    return is_marker(node) or may_have_effects(node.target) or AHEAD.on(node)


def _block(
    nodes: Sequence[fx.Node], operands: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.Graph:
    """The graph of a block, whose results are in memory of their own."""
    graph = extracted(fx.Graph(), nodes, operands, results)
    output = graph.output_node()
    values: Any = output.args[0]
    taken, made = set[fx.Node](), list[fx.Node]()
    for value in values:
        storage = storage_of(value)
        shared = storage.op == "placeholder" or storage in taken
        taken.add(storage)
        with graph.inserting_before(output):
            made.append(_contiguous(graph, value, shared))
    output.args = (tuple(made),)
    return graph


def _contiguous(graph: fx.Graph, value: fx.Node, shared: bool) -> fx.Node:
    """A result of a block as a program takes it to be: contiguous, whichever block has run."""
    target = aten.clone.default if shared else aten.contiguous.default
    made = graph.call_function(target, (value,), {"memory_format": torch.contiguous_format})
    inherit(made, value, "value")
    return made
