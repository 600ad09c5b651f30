"""Buckets: collectives that can wait for one another cross the network as one call.

Chosen on the SPMD graph, so every rank merges the same ones. Members of a bucket stay steps of their own,
the identity on global values; they carry the same ``meta["bucket"]``, stand side by side, and a transport
may move them together. After PyTorch's DistributedDataParallel (Li et al. 2020, §3.2.3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import COLLECTIVE, PHASE, RECOMPUTE, VAL
from torchard.sharding.layouts.collective_ops import AllReduce
from torchard.sharding.layouts.tags import BUCKET
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.scheduling.collectives import Collective, op_of

__all__ = ["Bucket", "first_use", "merge", "merge_reductions", "positions"]

_LEAST_BYTES = 25 * 2**20  # a bucket smaller than this would gain nothing from being cut
_MOST_CALLS = 4


@dataclass(eq=False, frozen=True)
class Bucket:
    """What the members of one bucket have in common; compared by identity."""

    members: int


def merge_reductions(graph: fx.Graph, limit: int | None = None) -> None:
    """Merge all_reduces whose results nobody needs before the last of them can be made.

    Gradients are; an activation, needed at once, never waits for another, nor does one that is made
    again. A bucket sends no more than `limit` bytes, unless a single value does; by default large
    programs make four calls per kind of value, so that most of the traffic runs beside the backward.
    """
    kinds: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        if (key := _kind(node)) is not None:
            kinds.setdefault(key, []).append(node)
    for found in kinds.values():
        for members in list(_windows(graph, found, limit)):
            if len(members) > 1:
                merge(members, members[-1])


def _kind(node: fx.Node) -> object | None:
    """What members of a bucket must have in common; None for what is never merged."""
    op = op_of(node)
    if node.op != "call_function" or not isinstance(op, AllReduce) or op.reduction != "sum":
        return None
    val: torch.Tensor = VAL.of(node)
    if val.dtype == torch.bool or RECOMPUTE.get(node):
        return None
    return op.axes, val.dtype, val.device, PHASE.get(node, "forward")


def _windows(
    graph: fx.Graph, found: Sequence[fx.Node], limit: int | None
) -> Iterator[list[fx.Node]]:
    """Runs of collectives, in order: each is ready before the first result of its run is used."""
    at = positions(graph)
    uses = [first_use(node, at) for node in found]
    # The last has nobody to wait for: others may wait for it.
    ready = [*(at[node] for node in found[1:]), 0]
    patient = [(n, use) for n, use, after in zip(found, uses, ready, strict=True) if use >= after]
    if limit is None:
        limit = max(_LEAST_BYTES, math.ceil(sum(_bytes(n) for n, _ in patient) / _MOST_CALLS))
    run: list[fx.Node] = []
    deadline, held = math.inf, 0
    for node, use in patient:
        if run and (at[node] > deadline or held + _bytes(node) > limit):
            yield run
            run, deadline, held = [], math.inf, 0
        run.append(node)
        deadline, held = min(deadline, use), held + _bytes(node)
    yield run


def _bytes(node: fx.Node) -> int:
    collective: Collective = COLLECTIVE.of(node)
    return collective.bytes


def positions(graph: fx.Graph) -> dict[fx.Node, float]:
    """Where each node stands; what is returned is not needed before the end."""
    at: dict[fx.Node, float] = {node: i for i, node in enumerate(graph.nodes)}
    at[graph.output_node()] = math.inf
    return at


def first_use(node: fx.Node, at: dict[fx.Node, float]) -> float:
    """The first position at which more than the name of a value is needed."""
    return min(
        (first_use(user, at) if is_alias(user) else at[user] for user in node.users),
        default=math.inf,
    )


def merge(members: Sequence[fx.Node], anchor: fx.Node) -> None:
    """Make one bucket of steps, placed at the anchor, one of them."""
    bucket = Bucket(len(members))
    for node in members:
        BUCKET.set(node, bucket)
        if node is not anchor:
            anchor.prepend(node)
    _record(members)


def _record(members: Sequence[fx.Node]) -> None:
    """The plan lists the bucket once, where its first member stands."""
    records: list[Collective] = list(map(COLLECTIVE.of, members))
    for node in members:
        forget(node, COLLECTIVE)
    first = records[0]
    together = replace(
        first,
        shape=(sum(math.prod(r.shape) for r in records),),
        bytes=sum(r.bytes for r in records),
        scope=_common([r.scope for r in records]),
        note=f"{len(records)} merged",
    )
    COLLECTIVE.set(members[0], together)


def _common(scopes: Sequence[str]) -> str:
    """The innermost scope that all of these are in; if there is none, the first and how many more."""
    parts = zip(*(scope.split("/") for scope in scopes), strict=False)
    shared = itertools.takewhile(lambda each: len({*each}) == 1, parts)
    distinct = sorted({*scopes}, key=scopes.index)
    named = next(filter(None, distinct), "")
    more = f" + {len(distinct) - 1} more" if len(distinct) > 1 else ""
    return "/".join(each[0] for each in shared) or named + more
