"""The loops of a rolled graph: how often operations run, what carries read, and an order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import Any

from torch import fx

from torchard.functional.programs.markers import (
    Loop,
    again,
    enter,
    goes_on,
    item,
    listed,
    row,
    rows,
)
from torchard.functional.programs.tags import AHEAD, LOOP, STAGE

__all__ = [
    "carried",
    "handed_on",
    "is_apart",
    "issued_ahead",
    "iterating",
    "loops_together",
    "move_to_readers",
    "ordered",
    "reads_alone",
    "regrouped",
    "times",
]


def times(node: fx.Node) -> int:
    """How often an operation runs."""
    loop = LOOP.get(node)
    return 1 if loop is None else loop.count


def carried(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The value that an `again` passes to the next iteration, and the node at which the value enters."""
    value, entered = node.args
    assert isinstance(value, fx.Node) and isinstance(entered, fx.Node)
    return value, entered


def handed_on(node: fx.Node) -> list[fx.Node]:
    """The nodes that pass on the values that enter at a node; empty if no values enter there."""
    if node.target is not enter:
        return []
    return [user for user in node.users if user.target is again and user.args[1] is node]


def iterating(node: fx.Node) -> list[fx.Node]:
    """What a loop does where a value enters: hand on the next, and decide if there is one."""
    if node.target is not enter:
        return []
    deciding = (
        node.graph.find_nodes(op="call_function", target=goes_on) if LOOP.of(node).is_open else ()
    )
    return [*handed_on(node), *(each for each in deciding if LOOP.get(each) is LOOP.of(node))]


def is_apart(node: fx.Node) -> bool:
    """Whether a node stands for values that are read one by one, and need no stack."""
    readers = {rows: item, listed: row}
    return node.target in readers and all(user.target is readers[node.target] for user in node.users)


def reads_alone(node: fx.Node) -> bool:
    """Whether a row of a list is read by one operation of its loop, which may take it out of the list."""
    (values,) = node.all_input_nodes
    return is_apart(values) and sum(LOOP.get(user) is LOOP.of(node) for user in values.users) == 1


def issued_ahead(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], int]:
    """The operations of a loop that are issued some iterations ahead, with what they need; and how many.

    None are if they depend on a carry, or on another loop's values. A result that is awaited is awaited
    in its own iteration.
    """
    loop, late = LOOP.get(nodes[0]), set[fx.Node]()
    for node in nodes:
        if STAGE.get(node) == "wait" or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    needed = {node for node in nodes if AHEAD.get(node) and node not in late}
    for node in reversed(nodes):
        if node in needed:
            needed.update(operand for operand in node.all_input_nodes if LOOP.on(operand))
    wanted = max((AHEAD.of(node) for node in needed if AHEAD.on(node)), default=0)
    distance = min(wanted, LOOP.of(nodes[0]).count - 1) if needed else 0
    alone = distance and all(LOOP.of(n) is loop and n.target not in (enter, again) for n in needed)
    return ([node for node in nodes if node in needed], distance) if alone else ([], 0)


def regrouped(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph, those of a loop together."""
    return loops_together(graph.nodes)


def loops_together(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes of a graph, those of a loop together; otherwise in their order, if it can be kept.

    Passes add operations where they are needed: what a loop reads may stand inside of it.
    """
    nodes = list(nodes)
    if not any(LOOP.on(node) for node in nodes):
        return nodes
    groups: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        groups.setdefault(LOOP.get(node) or node, []).append(node)
    of = {node: key for key, members in groups.items() for node in members}
    reads = {
        key: {of[n] for n in _operands(members) if n in of} - {key}
        for key, members in groups.items()
    }
    order = ordered(reads, {key: i for i, key in enumerate(groups)})
    return [node for key in order for node in groups[key]]


def ordered(reads: Mapping[Any, set[Any]], place: Mapping[Any, int]) -> list[Any]:
    """Keys, each after those that it reads; otherwise by place.

    Raises:
        graphlib.CycleError: one reads itself.
    """
    sorter = TopologicalSorter(reads)
    sorter.prepare()
    keys = {place[key]: key for key in reads}
    ready, order = [place[key] for key in sorter.get_ready()], list[Any]()
    heapify(ready)
    while ready:
        order.append(key := keys[heappop(ready)])
        sorter.done(key)
        for freed in sorter.get_ready():
            heappush(ready, place[freed])
    return order


def _operands(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [operand for node in nodes for operand in node.all_input_nodes]


def move_to_readers(graph: fx.Graph, loops: Iterable[Loop]) -> None:
    """Move operations of these loops into the first loop that reads them, one iteration at a time.

    What a carry depends on stays, and what is collected of all iterations.
    """
    movable, order = set(loops), regrouped(graph)
    place = {LOOP.of(node): i for i, node in enumerate(order) if LOOP.on(node)}
    for node in reversed(order):
        loop = LOOP.get(node)
        readers = {LOOP.get(user) for user in node.users}
        if loop not in movable or loop is None or node.target in (enter, again) or not readers:
            continue
        fitting = [each for each in readers if each is not None and each.span == loop.span]
        if len(fitting) == len(readers) and loop not in readers:
            LOOP.set(node, min(fitting, key=place.__getitem__))
