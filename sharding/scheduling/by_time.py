"""Buckets by time: reductions are merged so that, on a machine, the program ends first.

A large bucket costs one latency, but is sent only when its last member is computed; of small ones, all
but the last are sent while the rest of the backward is computed. The candidates are simulated: operations
run one after another, with the seconds of the largest shard; buckets are sent one after another, each
from its last member, and their first use waits. After PyTorch's DistributedDataParallel (Li et al. 2020,
§3.2.3), where the size of buckets is a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import fx

from torchard.functional.costs.seconds import busy_seconds
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, STEP
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.scheduling.collectives import Collective

__all__ = ["Buckets", "fastest"]

Buckets = Sequence[Sequence[fx.Node]]

_PARTS = (1, 2, 4, 8, 16)


def fastest(
    split: Callable[[int], Buckets],
    most: int,
    uses: dict[fx.Node, float],
    graph: fx.Graph,
    machine: Machine,
    sizes: Sizes,
) -> Buckets:
    """The buckets with which the program ends first; of equals, the largest.

    Args:
        split: the buckets of at most a number of bytes, in the order in which they are sent.
        most: the most bytes of a bucket.
        uses: the position of each member's first use.
    """
    whole = split(most)
    if not machine.overlaps or _bytes(whole) <= _worth_a_call(whole, machine):
        return whole
    done = _done(graph, machine, sizes)
    candidates = [whole, *(split(math.ceil(most / parts)) for parts in _PARTS[1:])]
    return min(candidates, key=lambda buckets: _end(buckets, done, uses, machine))


def _bytes(buckets: Buckets) -> int:
    return sum(_record(node).bytes for bucket in buckets for node in bucket)


def _worth_a_call(buckets: Buckets, machine: Machine) -> float:
    """The bytes that are sent in the time of one latency: two calls for fewer gain nothing."""
    link = machine.link_of(_record(buckets[0][0]).axes, "all_reduce")
    return link.latency * link.bandwidth


def _record(node: fx.Node) -> Collective:
    collective: Collective = COLLECTIVE.of(node)
    return collective


def _done(graph: fx.Graph, machine: Machine, sizes: Sizes) -> dict[fx.Node, float]:
    """When each node has been computed, if nothing is waited for."""
    now, done, table = 0.0, {}, dict(sizes)
    for node in graph.nodes:
        if node.op == "call_function" and not STEP.on(node):
            busy = busy_seconds(node, machine)
            if busy:
                axes = {a for n in (node, *node.all_input_nodes) for a in _split_axes(n)}
                now += busy / math.prod(table[a] for a in axes) + machine.launch * times(node)
        done[node] = now
    return done


def _split_axes(node: fx.Node) -> set[str]:
    layouts: Layout | tuple[Layout, ...] = LAYOUT.get(node, ())
    return {a for x in (layouts if isinstance(layouts, tuple) else (layouts,)) for a in x.split_axes}


def _end(
    buckets: Buckets, done: dict[fx.Node, float], uses: dict[fx.Node, float], machine: Machine
) -> float:
    """When the program ends."""
    at: dict[float, float] = dict(enumerate(done.values()))
    place = {node: i for i, node in enumerate(done)}
    arrives: dict[float, float] = {}
    free = waited = 0.0
    for bucket in buckets:
        axes = _record(bucket[0]).axes
        sent = machine.link_of(axes, "all_reduce").seconds(sum(_record(n).bytes for n in bucket))
        free = max(free, done[max(bucket, key=place.__getitem__)]) + sent
        use = min(uses[node] for node in bucket)
        arrives[use] = max(arrives.get(use, 0.0), free)
    last = max(at.values(), default=0.0)
    for use, arrival in sorted(arrives.items()):
        waited = max(waited, arrival - at.get(use, last))
    return last + waited
