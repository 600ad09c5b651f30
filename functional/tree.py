"""Pytrees as this library sees them: optree's, None a leaf, namespace "torchard".

Only here are optree's defaults overruled. A type registered here is also a node of torch's own
pytree, so that torch's transforms see into it. Dicts are ordered by key, not by insertion.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import optree
import torch.utils._pytree as torch_pytree

__all__ = [
    "NAMESPACE",
    "broadcast",
    "flatten",
    "leaves",
    "map",
    "paths",
    "register",
    "structure",
    "unflatten",
]

NAMESPACE = "torchard"


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure; `unflatten(structure, leaves)` puts them together again."""
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(structure: optree.PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """The tree of this structure with these leaves; ValueError if their number is wrong."""
    return optree.tree_unflatten(structure, leaves)


def leaves(tree: Any) -> list[Any]:
    """The leaves, in the order of `flatten`."""
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def structure(tree: Any) -> optree.PyTreeSpec:
    """What remains without the leaves: hashable and comparable."""
    return optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)


def map(fn: Callable[..., Any], tree: Any, *rests: Any) -> Any:
    """fn of corresponding leaves; ValueError naming the place where the structures differ.

    As in optree, a leaf of the first tree may face a whole subtree of another.
    """
    try:
        return optree.tree_map(fn, tree, *rests, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        for number, rest in enumerate(rests, 1):
            for problem in optree.prefix_errors(tree, rest, none_is_leaf=True, namespace=NAMESPACE):
                raise problem(f"tree 0, mapped with tree {number}, at tree") from error
        raise


def broadcast(prefix: Any, full: Any, name: str = "prefix", what: str = "the tree") -> list[Any]:
    """One leaf of the prefix for each leaf of the full tree.

    Raises:
        ValueError: it is no prefix; the message has ``name``, ``what`` and where they part.
    """
    try:
        spread: list[Any] = optree.broadcast_prefix(
            prefix, full, none_is_leaf=True, namespace=NAMESPACE
        )
    except ValueError as error:
        raise ValueError(_misfit(prefix, full, name, what)) from error
    return spread


def _misfit(prefix: Any, full: Any, name: str, what: str) -> str:
    problems = optree.prefix_errors(prefix, full, none_is_leaf=True, namespace=NAMESPACE)
    details = "; ".join(" ".join(str(problem(name)).split()) for problem in problems)
    return (
        f"{name} is not a prefix of {what}: {details} Give every leaf a value, or one value for a "
        "whole subtree."
    )


def paths(tree: Any, root: str = "") -> list[str]:
    """Each leaf as it would be written in Python: `paths({"w": [1]}, "p") == ["p['w'][0]"]`."""
    found = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify(root) for accessor in found]


def register(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
) -> None:
    """Make a type a node, for this library and for torch; ValueError if torch has it already.

    flatten(node) -> (children, static) and unflatten(static, children) -> node, where static is
    hashable and comparable.
    """

    def torch_flatten(node: Any) -> tuple[list[Any], Any]:
        children, static = flatten(node)
        return list(children), static

    torch_pytree.register_pytree_node(
        cls, torch_flatten, lambda children, static: unflatten(static, list(children))
    )
    restore: Any = unflatten  # optree's type wants every node to be a Collection
    optree.register_pytree_node(cls, flatten, restore, namespace=NAMESPACE)
