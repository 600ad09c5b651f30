"""Buckets by time: reductions are merged so that, on a machine, the program ends first.

A large bucket costs one latency, but is sent only when its last member is computed; of small ones, all
but the last are sent while the rest of the backward is computed. The candidates are simulated: operations
run one after another, with the seconds of the largest shard; buckets are sent one after another, each
from its last member, and their first use waits. After PyTorch's DistributedDataParallel (Li et al. 2020,
§3.2.3), where the size of buckets is a constant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from torchard.functional.costs.seconds import busy_seconds
from torchard.functional.machines.machine import Link, Machine
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, STEP
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.scheduling.collectives import Collective

__all__ = ["Buckets", "fastest", "seconds_of_rank"]

Buckets = Sequence[Sequence[fx.Node]]

_PARTS = (2, 4, 8, 16)


def fastest(
    split: Callable[[int], Buckets],
    most: int,
    at: Mapping[fx.Node, float],
    uses: Mapping[fx.Node, float],
    machine: Machine,
    seconds: Callable[[fx.Node], float],
) -> Buckets:
    """The buckets with which the program ends first; of equals, the largest.

    Args:
        split: the buckets of at most a number of bytes, in the order in which they are sent.
        most: the most bytes of a bucket.
        at: the position of each node, in order; ``uses``: of each member's first use.
        seconds: how long a node is computed.
    """
    whole = split(most)
    link = machine.link_of(_record(whole[0][0]).axes, "all_reduce")
    # In the time of one latency, so many bytes are sent: two calls for fewer gain nothing.
    if not machine.overlaps or sum(map(_bytes, whole)) <= link.latency * link.bandwidth:
        return whole
    done = list(itertools.accumulate(map(seconds, at)))
    candidates = [whole, *(split(math.ceil(most / parts)) for parts in _PARTS)]
    return min(candidates, key=lambda buckets: _end(buckets, done, at, uses, link, machine))


def _bytes(bucket: Sequence[fx.Node]) -> int:
    return sum(_record(node).bytes for node in bucket)


def _record(node: fx.Node) -> Collective:
    collective: Collective = COLLECTIVE.of(node)
    return collective


def seconds_of_rank(node: fx.Node, machine: Machine, sizes: Mapping[str, int]) -> float:
    """How long a rank computes a node of an SPMD program, in all iterations."""
    busy = 0.0 if STEP.on(node) or node.op != "call_function" else busy_seconds(node, machine)
    if not busy:
        return 0.0
    axes = {a for n in (node, *node.all_input_nodes) for a in _split_axes(n)}
    return busy / math.prod(sizes[a] for a in axes) + machine.launch * times(node)


def _split_axes(node: fx.Node) -> set[str]:
    layouts: Layout | tuple[Layout, ...] = LAYOUT.get(node, ())
    return {a for x in (layouts if isinstance(layouts, tuple) else (layouts,)) for a in x.split_axes}


def _end(
    buckets: Buckets,
    done: Sequence[float],
    at: Mapping[fx.Node, float],
    uses: Mapping[fx.Node, float],
    link: Link,
    machine: Machine,
) -> float:
    """When the program ends, if `done` says when each position does without waiting or sending."""
    free = waited = sent = 0.0
    for bucket in buckets:
        free = max(free, done[int(at[bucket[-1]])] + sent) + link.seconds(_bytes(bucket))
        sent += machine.sending(link, _bytes(bucket))
        use = min(uses[node] for node in bucket)
        waited = max(waited, free - done[-1 if math.isinf(use) else int(use)] - sent)
    return done[-1] + sent + waited
