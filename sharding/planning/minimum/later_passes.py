"""What later passes make of moves: which are made again, and which are merged.

A backward gathers parameters again that are split over the batch's axes (`scheduling/gathers.py`).
Gathers of a layer's parameters, and sums of gradients, become few calls (`scheduling/bucket.py`).
"""

from __future__ import annotations

from torch import fx

from torchard.functional.programs.markers import listed
from torchard.functional.programs.tags import PHASE
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.planning.decision import BATCH, PARAMETER, Given
from torchard.sharding.planning.minimum.choices import is_part

__all__ = ["LaterPasses"]

_MERGED = 0.1  # of a call: about ten parameters have a layer, or a bucket of gradients


class LaterPasses:
    """The parameters of a program, with views of them, and its gradients; none without a machine.

    Attributes:
        axes: those that split a batch: along others a gathered parameter is kept.
    """

    def __init__(self, graph: fx.Graph, given: Given) -> None:
        self.axes = frozenset(
            a for layout, rank in given.ranked_layouts if rank == BATCH for a in layout.split_axes
        )
        roots: dict[fx.Node, fx.Node] = {}  # of parameters and their views
        nodes = graph.nodes if given.on else ()
        for node in nodes:
            if _is_parameter(node, given):
                roots[node] = node
            elif _is_part(node) and node.all_input_nodes[0] in roots:
                roots[node] = roots[node.all_input_nodes[0]]
        self._read_twice = {v for v in roots if len(_phases(v)) > 1}
        # A parameter that is split on entry is gathered by itself.
        self._merged = {v for v, root in roots.items() if root.op == "placeholder"}
        self._merged |= {node for node in nodes if _is_gradient(node)}

    def makes_again(self, value: fx.Node) -> bool:
        """Whether a backward gathers a value again, along the axes of the batch."""
        return bool(self.axes) and value in self._read_twice

    def times(self, value: fx.Node, have: Layout, want: Layout) -> int:
        """How often a value that all read in another layout is moved to it."""
        gathered = {*have.split_axes} - {*want.split_axes}
        return 2 if self.makes_again(value) and gathered and gathered <= self.axes else 1

    def calls(self, value: fx.Node) -> float:
        """The calls that a collective on a value is, of those with which it is merged."""
        return _MERGED if value in self._merged else 1.0


def _is_parameter(node: fx.Node, given: Given) -> bool:
    known = given.inputs.get(node)
    if isinstance(known, tuple):
        return known[1] == PARAMETER
    return node in given.constraints and given.ranks[node] == PARAMETER


def _is_part(node: fx.Node) -> bool:
    return is_part(node) or node.target is listed


def _is_gradient(node: fx.Node) -> bool:
    """Whether a value is the last of a backward: what reads it is an update, or nothing."""
    return PHASE.get(node) == "backward" and all(PHASE.get(u) != "backward" for u in node.users)


def _phases(value: fx.Node) -> set[bool]:
    """Whether a value's users, directly or through views, are in a backward."""
    found: set[bool] = set()
    for user in value.users:
        found |= _phases(user) if _is_part(user) else {PHASE.get(user) == "backward"}
    return found
