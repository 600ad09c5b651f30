"""Whether one plan is better than another on any machine.

A plan may send less by more collectives, or by computing more. So two plans are compared on machines of
which one has no latency, and one whose latency is half of what a collective's bytes take; of which one
computes slowly, and one fast.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from torch import fx

from torchard.functional.costs.flops import is_product
from torchard.functional.programs.loops import times
from torchard.functional.programs.tags import STEP, VAL
from torchard.sharding.layouts.layout import Sizes
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.planning.decision import Given, LayoutDecision, work_per_point
from torchard.sharding.scheduling.partition import partition

__all__ = ["Figures", "figures"]

_FASTER = (1.0, 16.0)  # how many times as long computing takes
_LATENCIES = (0.0, 0.5)  # in the time of the mean collective's bytes
_LITTLE = 1e-3
_MOST = 0.9  # of what another plan sends or computes: nearly equal plans stay as they are


class Figures(NamedTuple):
    """What a plan costs on each rank.

    Attributes:
        sending: seconds of sending.
        calls: collectives that products wait for, and one for all others: they can be merged.
        work: seconds that the busiest rank computes.
    """

    sending: float
    calls: int
    work: float

    def dominates(self, other: Figures) -> bool:
        """Whether a plan is faster than another on each machine, and much less is sent or computed."""
        if self.sending > _MOST * other.sending and self.work > _MOST * other.work:
            return False
        mean = other.sending / max(other.calls, 1)
        machines = itertools.product(_FASTER, (mean * latency for latency in _LATENCIES))
        return all(self._on(*m) < other._on(*m) * (1 - _LITTLE) for m in machines)

    def _on(self, slower: float, latency: float) -> float:
        return self.sending + self.calls * latency + slower * self.work


def figures(graph: fx.Graph, given: Given, decision: LayoutDecision, sizes: Sizes) -> Figures:
    """What a decision costs; a value that several users read in one layout is moved once."""
    spmd = partition(graph, given, decision, sizes)
    needed, sending, calls, merged = _before_products(spmd), 0.0, 0, 0
    late: set[fx.Node] = set()
    for node in spmd.nodes:
        if any(n in late or is_product(n) for n in node.all_input_nodes):
            late.add(node)
        if STEP.on(node) and (step := STEP.of(node)).collective.sends:
            size = step.elements(sizes) * VAL.of(node).dtype.itemsize * times(node)
            sending += size / given.machine.link_of(step.axes, step.kind).bandwidth
            if node in late and node in needed:
                calls += times(node)
            else:
                merged = 1
    work = sum(
        option.cost(sizes).work * work_per_point(node, given.machine)
        for node, option in decision.option.items()
        if not is_alias(node)
    )
    return Figures(sending, calls + merged, work)


def _before_products(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of which a product depends."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in found or is_product(node):
            found.update(node.all_input_nodes)
    return found
