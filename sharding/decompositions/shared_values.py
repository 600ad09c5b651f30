"""Values that all ranks along some axes must have: gathered, or computed from smaller ones that are.

And values that these ranks then split among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.effects.in_place import is_pointwise
from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.tags import CALL, RULE
from torchard.sharding.values.constrain import number_of
from torchard.sharding.values.spec import P

__all__ = ["ROWS", "Axes", "Constraint", "SharedValues", "size_of"]

Axes = tuple[str, ...]
Constraint = Callable[[Layout, Sizes], Layout]
# Operations that move rows.
ROWS = (
    aten.gather.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_select.default,
)


class SharedValues:
    """The values of a graph that all ranks along some axes have.

    Attributes:
        constraints: the nodes that constrain values, with their layout, given that of the value.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.constraints: dict[fx.Node, Constraint] = {}
        self._known: dict[tuple[fx.Node, Axes], fx.Node] = {}

    def read(self, node: fx.Node, axes: Axes, user: fx.Node, *, as_it_is: bool = False) -> fx.Node:
        """The value, inserted before a user.

        Args:
            as_it_is: whether not to compute it from smaller values.
        """
        if not _cost(node):
            return node  # a constant
        if (node, axes) not in self._known:
            again = not as_it_is and _cost(node) < size_of(node)
            self._known[node, axes] = (self._again if again else self._pinned)(node, axes, user)
        return self._known[node, axes]

    def _again(self, node: fx.Node, axes: Axes, user: fx.Node) -> fx.Node:
        operands = {n: self.read(n, axes, user) for n in node.all_input_nodes}
        with self.graph.inserting_before(user):
            copy = self.graph.node_copy(node, operands.__getitem__)
        forget(copy, CALL, RULE)
        return copy

    def _pinned(self, node: fx.Node, axes: Axes, user: fx.Node) -> fx.Node:
        def whole(layout: Layout, sizes: Sizes) -> Layout:
            return layout.along(layout.axes.difference(axes), sizes)

        with self.graph.inserting_before(user):
            return self._constrained(node, whole)

    def split(self, node: fx.Node, axes: Axes, order: Axes) -> None:
        """Split the first dim of a value over axes, for all its users; in this order of all its axes."""

        def split(layout: Layout, sizes: Sizes) -> Layout:
            return layout.along(layout.axes.difference(axes), sizes).split_further(axes, order)

        with self.graph.inserting_after(node):
            pin = self._constrained(node, split)
        node.replace_all_uses_with(pin, lambda user: user is not pin)

    def _constrained(self, node: fx.Node, constraint: Constraint) -> fx.Node:
        constrain: Any = torch.ops.torchard.constrain.default
        pin = add_call(node, constrain, node, number_of(P()), val=VAL.of(node))
        self.constraints[pin] = constraint
        return pin


def _cost(node: fx.Node) -> int:
    """The bytes of the fewest values from which a value follows by moving rows and element by element."""
    if not node.all_input_nodes and node.op == "call_function":
        return 0
    if not (is_view(node) or _is_pointwise(node.target) or node.target in ROWS):
        return size_of(node)
    return min(size_of(node), sum(map(_cost, node.all_input_nodes)))


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, internals.OpOverload) and is_pointwise(target)


def size_of(node: fx.Node) -> int:
    """The bytes of a value."""
    val = VAL.of(node)
    return int(val.numel() * val.itemsize)
