"""Graphs that are made quickly."""

from __future__ import annotations

import functools
from typing import Any

from torch import fx
from torch._ops import OpOverload

from torchard.functional.torch_internals.accessors.required import require

__all__ = ["ProgramGraph"]

require(fx.Graph, "_target_to_str")

# As `node.args = args` does, without fx.Node.__setattr__, which enters the node in a table again.
_set_args, _set_kwargs = (getattr(fx.Node, name).fset for name in ("args", "kwargs"))


class ProgramGraph(fx.Graph):
    """A graph that does not look for symbolic sizes among the arguments of each new node.

    Programs have none. Torch looks for them in order to warn, which takes half of the time of a new node,
    and derives the name of a node from the name of its operator each time.
    """

    def create_node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> fx.Node:
        if name is None and isinstance(target, OpOverload):
            name = _name_of(target)
        node = super().create_node(op, target, None, None, name, type_expr)
        if args:
            _set_args(node, args)
        if kwargs:
            _set_kwargs(node, kwargs)
        return node


@functools.cache
def _name_of(target: OpOverload) -> str:
    return fx.Graph()._target_to_str(target)
