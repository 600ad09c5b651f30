"""Results of other libraries: node types known to torch's pytree are registered with optree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optree

from torchard.functional.core import tree
from torchard.functional.torch_internals.accessors import pytree as torch_pytree

__all__ = ["register_torch_nodes"]


@dataclass(frozen=True)
class _Context:
    """The static part of a node in torch's pytree, made hashable: optree requires it, torch does not."""

    value: Any

    def __hash__(self) -> int:
        return hash(repr(self.value))


def register_torch_nodes(value: Any) -> None:
    """Register the types in a tree that torch's pytree knows and optree does not.

    HuggingFace's model outputs, for example, register with torch only.
    """
    for leaf in tree.leaves(value):
        node = torch_pytree.SUPPORTED_NODES.get(type(leaf))
        if node is None:
            continue
        # The leaves were listed before the first of its class was registered.
        if any(each is leaf for each in tree.leaves(leaf)):
            _register(type(leaf), node)
        register_torch_nodes(leaf)


def _register(cls: type, node: Any) -> None:
    def flatten(value: Any) -> tuple[list[Any], _Context]:
        children, context = node.flatten_fn(value)
        return children, _Context(context)

    def unflatten(context: _Context, children: Any) -> Any:
        return node.unflatten_fn(list(children), context.value)

    restore: Any = unflatten
    optree.register_pytree_node(cls, flatten, restore, namespace=tree.NAMESPACE)
