"""What later passes make of moves: which are made again, and which are merged.

A backward gathers parameters again that are split over the batch's axes (`scheduling/gathers.py`).
Gathers of a layer's parameters, and sums of gradients or of what is returned of them, become few calls
(`scheduling/bucket.py`).
"""

from __future__ import annotations

from torch import fx

from torchard.functional.programs.markers import listed
from torchard.functional.programs.tags import PHASE
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.planning.decision import BATCH, PARAMETER, Given
from torchard.sharding.planning.minimum.choices import is_part
from torchard.sharding.planning.minimum.reshards import Calls
from torchard.sharding.planning.updates import after_backward

__all__ = ["LaterPasses"]

_MERGED = 0.1  # of a call: about ten parameters have a layer, or a bucket of gradients
_ALONE = Calls()


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
        self._calls = {
            v: Calls(moves=_MERGED) for v, root in roots.items() if root.op == "placeholder"
        }
        late = after_backward(graph) if given.on else set()
        self._calls |= {node: Calls(sums=_MERGED) for node in late if _waits(node)}

    def makes_again(self, value: fx.Node) -> bool:
        """Whether a backward gathers a value again, along the axes of the batch."""
        return bool(self.axes) and value in self._read_twice

    def times(self, value: fx.Node, have: Layout, want: Layout) -> int:
        """How often a value that all read in another layout is moved to it."""
        gathered = {*have.split_axes} - {*want.split_axes}
        return 2 if self.makes_again(value) and gathered and gathered <= self.axes else 1

    def calls(self, value: fx.Node) -> Calls:
        """The calls that collectives on a value are, of those with which they are merged."""
        return self._calls.get(value, _ALONE)


def _is_parameter(node: fx.Node, given: Given) -> bool:
    known = given.inputs.get(node)
    if isinstance(known, tuple):
        return known[1] == PARAMETER
    return node in given.constraints and given.ranks[node] == PARAMETER


def _is_part(node: fx.Node) -> bool:
    return is_part(node) or node.target is listed


def _waits(node: fx.Node) -> bool:
    """Whether a backward's result, or what follows it, is only returned or read by an update."""
    if PHASE.get(node) == "backward":
        return all(PHASE.get(user) != "backward" for user in node.users)
    return all(user.op == "output" for user in node.users)


def _phases(value: fx.Node) -> set[bool]:
    """Whether a value's users, directly or through views, are in a backward."""
    found: set[bool] = set()
    for user in value.users:
        found |= _phases(user) if _is_part(user) else {PHASE.get(user) == "backward"}
    return found
