"""The data of a budget's integer program: operations, their costs, and when they are read.

A loop is planned by one of its iterations: what is kept of it is kept of all, and what is recomputed is
alive in one. What an iteration hands to the next is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from torchard.functional.costs.flops import flops_of
from torchard.functional.execution.storages import Liveness
from torchard.functional.programs.loops import is_apart, times
from torchard.functional.programs.markers import again, item, listed, row, rows, total
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import LOOP, VAL
from torchard.functional.programs.views import base_of, is_tuple, needed_by
from torchard.functional.remat.liveness import (
    Storage,
    bytes_in,
    liveness,
    order_of,
    storage_key,
)
from torchard.functional.remat.policies import Budget
from torchard.functional.remat.remat_ilp import Problem
from torchard.functional.remat.rematerialise import passes_of
from torchard.functional.remat.segments import segments_of

__all__ = ["SMALL", "is_choice", "problem_of"]

SMALL = 16  # up to this many operations, time is not divided into buckets
_BUCKETS = 24  # buckets of the backward; fewer if it has fewer operations


def problem_of(program: Program) -> tuple[list[fx.Node], Problem]:
    """The operations on whose results a budget decides, and the integer program's data."""
    passes, live = passes_of(program), liveness(program)
    bytes_at = bytes_in(program)

    def size(node: fx.Node) -> int:
        """The bytes of all results of an operation."""
        items = len(VAL.of(node)) if is_tuple(node) else 1
        return sum(bytes_at(node, i) for i in range(items)) if storage_key(node).node is node else 0

    order = dict.fromkeys(order_of(program))
    needed = needed_by(node for node in order if passes[node])
    operations = [n for n in order if not passes[n] and n in needed and is_choice(n)]
    late = [node for node in order if passes[node]]
    buckets = min(_BUCKETS if len(operations) > SMALL else len(late), len(late))
    bucket = {node: time * buckets // len(late) for time, node in enumerate(late)}
    uses = _uses(operations, bucket)
    held = live.held(without=operations)
    base, before = [0] * buckets, [0] * buckets
    for at, node in enumerate(live.order):
        if passes[node]:
            k = bucket[node]
            base[k] = max(base[k], held[at])
            before[k] = max(before[k], held[at] - size(node))
    sizes = [sum(bytes_at(at.node, at.item) for at in storages) for storages in uses.results]
    often = [times(node) for node in operations]
    costs = [flops_of(node) for node in operations]
    ahead = _ahead(live, operations, passes, held, size)
    problem = Problem(costs, sizes, often, uses.sources, uses.reads, uses.forced, base, before, ahead)
    return operations, problem


class _Uses(NamedTuple):
    """The uses of the operations on which a budget decides. Each operation is given by its number.

    Attributes:
        sources: the operations that each operation reads.
        reads: the buckets of the backward in which each operation is read.
        results: the storages of each operation that are read.
        forced: the operations whose results leave their segment, or their iteration, and are saved.
    """

    sources: list[list[int]]
    reads: list[set[int]]
    results: list[set[Storage]]
    forced: set[int]


def _uses(operations: Sequence[fx.Node], bucket: Mapping[fx.Node, int]) -> _Uses:
    """Who reads the operations: each other, and the backward, whose nodes are in buckets."""
    number = {node: v for v, node in enumerate(operations)}
    uses = _Uses([[] for _ in number], [set() for _ in number], [set() for _ in number], set())
    for reader in (*operations, *bucket):
        for storage in read_by(reader):
            v = number.get(storage.node)
            if v is None:
                continue
            uses.results[v].add(storage)
            if reader in number:
                uses.sources[number[reader]].append(v)
            else:
                uses.reads[v].add(bucket[reader])
            if not _share_budget(operations[v], reader):
                uses.forced.add(v)
    uses.forced.update(v for v, node in enumerate(operations) if _is_handed_on(node))
    return uses


def _ahead(
    live: Liveness,
    operations: Sequence[fx.Node],
    passes: Mapping[fx.Node, int],
    held: Sequence[int],
    size: Callable[[fx.Node], int],
) -> list[tuple[int, list[int]]]:
    """For each bucket of the forward: bytes alive anyway, and earlier operations alive only if kept."""
    order = live.order
    early = list(itertools.takewhile(lambda at: not passes[order[at]], range(len(order))))
    number = {node: v for v, node in enumerate(operations)}
    begun: dict[int, int] = {}
    for at in early:
        if order[at] in number:
            begun.setdefault(number[order[at]], at)
    ended = dict(begun)  # the forward's last read
    for at in early:
        for source in read_by(order[at]):
            if (v := number.get(source.node)) is not None:
                ended[v] = max(ended[v], at)
    count = min(_BUCKETS if len(operations) > SMALL else len(early), len(early))
    buckets = []
    for run in (early[len(early) * k // count : len(early) * (k + 1) // count] for k in range(count)):
        anyway = [
            held[at] + sum(size(operations[v]) for v in begun if begun[v] <= at <= ended[v]) for at in run
        ]
        at = run[anyway.index(max(anyway))]
        loop = LOOP.get(order[at])
        later = [v for v in begun if ended[v] < at or (loop and LOOP.get(operations[v]) is loop)]
        buckets.append((max(anyway), later))
    return buckets


def is_choice(node: fx.Node) -> bool:
    """Whether a budget decides on a node's results: they are in its segment, in storages of their own.

    What a loop stacks or sums is kept.
    """
    budgeted = any(isinstance(segment.policy, Budget) for segment in segments_of(node))
    return budgeted and not is_apart(node) and storage_key(node).node is node


def _is_handed_on(node: fx.Node) -> bool:
    """Whether the next iteration reads a value, or what is read is of all iterations together."""
    aliases = [node]
    for alias in aliases:
        aliases += [user for user in alias.users if base_of(user) is alias]
    after = {user.target for alias in aliases for user in alias.users}
    return node.target in (rows, total) or not after.isdisjoint((again, listed, rows))


def read_by(node: fx.Node) -> Iterator[Storage]:
    """The storages that an operation reads; of lists and rows of which one is read, those of all."""
    sources = list(node.all_input_nodes)
    for source in sources:
        if source.target in (row, item, listed) or is_apart(source):
            sources += source.all_input_nodes
        elif source.target not in (rows, total):
            yield storage_key(source)
        else:
            yield Storage(source)


def _share_budget(one: fx.Node, other: fx.Node) -> bool:
    """Whether both are in a common segment with the budget."""
    both = set(segments_of(one)) & set(segments_of(other))
    return any(isinstance(segment.policy, Budget) for segment in both)
