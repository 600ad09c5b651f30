"""Pytrees as this library sees them: optree's, None a leaf, namespace "torchard".

Only here are optree's defaults overruled. A type registered here is also a node of torch's own
pytree, so that torch's transforms see into it. Dicts are ordered by key, not by insertion.

::

    @tree.register_dataclass
    @dataclass
    class Params:
        w: Tensor
        steps: Tensor                                       # integers
        act: str = field(default="gelu", metadata={"static": True})

    trained, rest = tree.partition(params)                  # floating tensors, and what is left
    grads = torch.func.grad(lambda t: loss(tree.combine(t, rest), x))(trained)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import optree
import torch
import torch.utils._pytree as torch_pytree

from torchard.functional.core.arguments import checked
from torchard.functional.core.placed import Lift, is_placed, lift_in_trace

__all__ = [
    "NAMESPACE",
    "broadcast",
    "combine",
    "flatten",
    "leaves",
    "map",
    "partition",
    "paths",
    "register",
    "register_dataclass",
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

    As in optree, a leaf of the first tree may face a whole subtree of another. While a function is
    traced, a placed tensor that it closes over is one leaf, as the tensors are that it computes.
    """
    lift = lift_in_trace()
    if lift is not None:
        tree, rests = _whole(lift, tree), tuple(_whole(lift, rest) for rest in rests)
    try:
        return optree.tree_map(fn, tree, *rests, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as error:
        for number, rest in enumerate(rests, 1):
            for problem in optree.prefix_errors(tree, rest, none_is_leaf=True, namespace=NAMESPACE):
                raise problem(f"tree 0, mapped with tree {number}, at tree") from error
        raise


def _whole(lift: Lift, tree: Any) -> Any:
    return optree.tree_map(
        lambda leaf: lift(leaf) if is_placed(leaf) else leaf,
        tree,
        is_leaf=is_placed,
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def broadcast(
    prefix: Any, full: Any, name: str = "prefix", what: str = "the tree", leaf: str = "value"
) -> list[Any]:
    """One leaf of the prefix for each leaf of the full tree.

    Raises:
        ValueError: it is no prefix; the message has ``name``, ``what`` and where they part.
    """
    try:
        spread: list[Any] = optree.broadcast_prefix(
            prefix, full, none_is_leaf=True, namespace=NAMESPACE
        )
    except ValueError as error:
        raise ValueError(_misfit(prefix, full, name, what, leaf)) from error
    return spread


def _misfit(prefix: Any, full: Any, name: str, what: str, leaf: str) -> str:
    problems = optree.prefix_errors(prefix, full, none_is_leaf=True, namespace=NAMESPACE)
    details = "; ".join(" ".join(str(problem(name)).split()) for problem in problems)
    return (
        f"{name} is not a prefix of {what}: {details} Give every leaf a {leaf}, or one {leaf} "
        "for a whole subtree."
    )


def paths(tree: Any, root: str = "") -> list[str]:
    """Each leaf as it would be written in Python: `paths({"w": [1]}, "p") == ["p['w'][0]"]`."""
    found = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify(root) for accessor in found]


@checked
def register(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
    *,
    entry: type[optree.PyTreeEntry] = optree.AutoEntry,
) -> None:
    """Make a type a node, for this library and for torch; ValueError if torch has it already.

    flatten(node) -> (children, static) and unflatten(static, children) -> node, where static is
    hashable and comparable. ``entry`` says how paths go into it.
    """

    def torch_flatten(node: Any) -> tuple[list[Any], Any]:
        children, static = flatten(node)[:2]
        return list(children), static

    torch_pytree.register_pytree_node(
        cls, torch_flatten, lambda children, static: unflatten(static, list(children))
    )
    restore: Any = unflatten  # optree's type wants every node to be a Collection
    optree.register_pytree_node(
        cls, flatten, restore, path_entry_type=entry, namespace=NAMESPACE
    )


Class = TypeVar("Class", bound=type)


@checked
def register_dataclass(cls: Class) -> Class:
    """Make a dataclass a node; usable as a decorator, above ``@dataclass``.

    Its fields are children, but for those with ``field(metadata={"static": True})``, which are part of
    the structure and must be hashable.

    Raises:
        TypeError: it is no dataclass.
        ValueError: it is registered already.
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is no dataclass; write @dataclass below, or use register.")
    fields = dataclasses.fields(cls)
    fixed = tuple(f.name for f in fields if f.metadata.get("static"))
    moving = tuple(f.name for f in fields if not f.metadata.get("static"))

    def flatten(node: Any) -> Any:
        static = tuple(getattr(node, name) for name in fixed)
        return [getattr(node, name) for name in moving], static, moving

    def unflatten(static: Any, children: Sequence[Any]) -> Any:
        # Not by the constructor: leaves may be anything while a tree is mapped.
        node: Any = object.__new__(cls)
        for name, value in zip((*fixed, *moving), (*static, *children), strict=True):
            object.__setattr__(node, name, value)
        return node

    register(cls, flatten, unflatten, entry=optree.DataclassEntry)
    return cls


# -- parts of trees -----------------------------------------------------------------------------------


class _Nothing:
    """Where a leaf was that is in another part: a node without leaves."""

    def __repr__(self) -> str:
        return "..."

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return hash(_Nothing)


_NOTHING = _Nothing()
register(_Nothing, lambda node: ((), None), lambda static, children: _NOTHING)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


@checked
def partition(tree: Any, choose: Callable[[Any], Any] = _is_floating) -> tuple[Any, Any]:
    """The tree twice: with the leaves that are chosen, and with the others.

    By default floating and complex tensors are, which is what derivatives are taken by; torch's
    transforms refuse other leaves. `combine` puts the two together again.

    Source: equinox.partition (Kidger, Garcia, arXiv:2111.00254).
    """
    found, shape = flatten(tree)
    flags = [bool(choose(leaf)) for leaf in found]

    def part(chosen: bool) -> Any:
        leaves = [x if flag == chosen else _NOTHING for x, flag in zip(found, flags, strict=True)]
        return unflatten(shape, leaves)

    return part(True), part(False)


def combine(*parts: Any) -> Any:
    """One tree of the parts that `partition` made of it; the first that has a leaf gives it.

    Raises:
        ValueError: the trees differ otherwise.
    """

    def first(*leaves: Any) -> Any:
        return next((leaf for leaf in leaves if leaf is not _NOTHING), _NOTHING)

    return optree.tree_map(
        first,
        *parts,
        is_leaf=lambda x: x is _NOTHING,
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
