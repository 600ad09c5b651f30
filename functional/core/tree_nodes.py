"""Types that are nodes of pytrees, registered with optree and with torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import optree

from torchard.functional.core.arguments import checked
from torchard.functional.torch_internals.accessors import pytree as torch_pytree

__all__ = ["NAMESPACE", "register", "register_dataclass"]

NAMESPACE = "torchard"
"""The optree namespace in which this library's node types are registered.

>>> import optree
>>> from torchard import tree
>>> optree.tree_leaves({"w": 1, "b": None}, none_is_leaf=True, namespace=tree.NAMESPACE)
[None, 1]
"""


@checked
def register(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
    *,
    entry: type[optree.PyTreeEntry] = optree.AutoEntry,
) -> None:
    """Register a type as a node of trees, for this library and for torch.

    Args:
        cls: the type.
        flatten: ``flatten(node) -> (children, static)``, where ``static`` is hashable and comparable.
        unflatten: ``unflatten(static, children) -> node``. The children may be of any type.
        entry: the ``optree.PyTreeEntry`` type that writes the node's children in paths.

    Raises:
        ValueError: the type is registered already.

    >>> from torchard import tree
    >>> class Pair:
    ...     def __init__(self, left, right):
    ...         self.left, self.right = left, right
    >>> tree.register(Pair, lambda p: ((p.left, p.right), None), lambda static, children: Pair(*children))
    >>> tree.leaves({"p": Pair(1, 2)})
    [1, 2]
    """

    def torch_flatten(node: Any) -> tuple[list[Any], Any]:
        children, static = flatten(node)[:2]
        return list(children), static

    torch_pytree.register_pytree_node(
        cls, torch_flatten, lambda children, static: unflatten(static, list(children))
    )
    restore: Any = unflatten  # optree's annotation requires nodes to be Collections
    optree.register_pytree_node(
        cls, flatten, restore, path_entry_type=entry, namespace=NAMESPACE
    )


Class = TypeVar("Class", bound=type)


@checked
def register_dataclass(cls: Class) -> Class:
    """Register a dataclass as a node of trees. Use it as a decorator, above ``@dataclass``.

    Fields are children, except those with ``field(metadata={"static": True})``: these are part of the
    structure and must be hashable.

    Args:
        cls: a dataclass.

    Returns:
        ``cls`` itself.

    Raises:
        TypeError: it is not a dataclass.
        ValueError: it is registered already.

    >>> from dataclasses import dataclass, field
    >>> from torchard import tree
    >>> @tree.register_dataclass
    ... @dataclass
    ... class Config:
    ...     w: int
    ...     act: str = field(default="gelu", metadata={"static": True})
    >>> tree.map(lambda leaf: leaf + 1, Config(w=1))
    Config(w=2, act='gelu')
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(
            f"{cls.__name__} is not a dataclass; write @dataclass below, or use register."
        )
    fields = dataclasses.fields(cls)
    static_names = tuple(f.name for f in fields if f.metadata.get("static"))
    child_names = tuple(f.name for f in fields if not f.metadata.get("static"))

    def flatten(node: Any) -> Any:
        static = tuple(getattr(node, name) for name in static_names)
        return [getattr(node, name) for name in child_names], static, child_names

    def unflatten(static: Any, children: Sequence[Any]) -> Any:
        # Without the constructor: leaves may be of any type while a tree is mapped.
        node: Any = object.__new__(cls)
        names = (*static_names, *child_names)
        for name, value in zip(names, (*static, *children), strict=True):
            object.__setattr__(node, name, value)
        return node

    register(cls, flatten, unflatten, entry=optree.DataclassEntry)
    return cls
