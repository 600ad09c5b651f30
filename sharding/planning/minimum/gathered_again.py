"""The parameters that a backward gathers again (`scheduling/gathers.py`), instead of keeping them."""

from __future__ import annotations

from torch import fx

from torchard.functional.programs.markers import listed, row
from torchard.functional.programs.tags import PHASE
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.planning.decision import BATCH, PARAMETER, Given

__all__ = ["GatheredAgain"]


class GatheredAgain:
    """Parameters and views of them, which a forward and its backward read.

    Attributes:
        axes: those that split a batch: along others a gathered parameter is kept.
    """

    def __init__(self, graph: fx.Graph, given: Given) -> None:
        known = [each for each in given.inputs.values() if isinstance(each, tuple)]
        known += [(layout, given.ranks[node]) for node, layout in given.constraints.items()]
        self.axes = frozenset(a for layout, rank in known if rank == BATCH for a in layout.split_axes)
        self._values: set[fx.Node] = set()
        for node in graph.nodes if self.axes else ():
            if _is_parameter(node, given) or (_is_part(node) and node.all_input_nodes[0] in self._values):
                self._values.add(node)
        self._values = {value for value in self._values if len(_phases(value)) > 1}

    def __contains__(self, value: fx.Node) -> bool:
        return value in self._values

    def times(self, value: fx.Node, have: Layout, want: Layout) -> int:
        """How often a value that all read in another layout is moved to it."""
        gathered = {*have.split_axes} - {*want.split_axes}
        return 2 if value in self._values and gathered and gathered <= self.axes else 1


def _is_parameter(node: fx.Node, given: Given) -> bool:
    known = given.inputs.get(node)
    if isinstance(known, tuple):
        return known[1] == PARAMETER
    return node in given.constraints and given.ranks[node] == PARAMETER


def _is_part(node: fx.Node) -> bool:
    return is_alias(node) or node.target in (row, listed, aten._to_copy.default)


def _phases(value: fx.Node) -> set[bool]:
    """Whether a value's users, directly or through views, are in a backward."""
    found: set[bool] = set()
    for user in value.users:
        found |= _phases(user) if _is_part(user) else {PHASE.get(user) == "backward"}
    return found
