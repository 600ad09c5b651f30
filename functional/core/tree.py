"""Pytrees as this library sees them: optree's, None a leaf, namespace "torchard".

optree's defaults are overridden in this module only. A type registered here is also a node of torch's
own pytree, so that torch's transforms traverse it. Dicts are ordered by key, not by insertion.

::

    @tree.register_dataclass
    @dataclass
    class Params:
        w: Tensor
        steps: Tensor                                       # integers
        act: str = field(default="gelu", metadata={"static": True})

    trained, rest = tree.partition(params)                  # floating tensors, and the other leaves
    grads = torch.func.grad(lambda t: loss(tree.combine(t, rest), x))(trained)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import optree
import torch

from torchard.functional.core.arguments import checked
from torchard.functional.core.placed import Lift, is_placed, lift_in_trace
from torchard.functional.torch_internals.accessors import pytree as torch_pytree

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
"""The optree namespace in which this library's node types are registered.

>>> import optree
>>> from torchard import tree
>>> optree.tree_leaves({"w": 1, "b": None}, none_is_leaf=True, namespace=tree.NAMESPACE)
[None, 1]
"""


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Split a tree into its leaves and its structure.

    Args:
        tree: a pytree; None is a leaf.

    Returns:
        The leaves and the structure; ``unflatten(structure, leaves)`` is the tree again.

    >>> from torchard import tree
    >>> leaves, structure = tree.flatten({"w": [1, 2], "b": None})
    >>> leaves
    [None, 1, 2]
    >>> tree.unflatten(structure, leaves)
    {'w': [1, 2], 'b': None}
    """
    return optree.tree_flatten(tree, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(structure: optree.PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """Build the tree of a structure from leaves.

    Args:
        structure: what `flatten` or `structure` returned.
        leaves: as many as the structure has, else ValueError; of any type.

    Returns:
        The tree.

    >>> from torchard import tree
    >>> tree.unflatten(tree.structure({"w": [1, 2]}), "ab")
    {'w': ['a', 'b']}
    """
    return optree.tree_unflatten(structure, leaves)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in the order of `flatten`.

    Args:
        tree: a pytree; None is a leaf.

    Returns:
        A list.

    >>> from torchard import tree
    >>> tree.leaves({"w": [1, 2], "b": None})
    [None, 1, 2]
    """
    return optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)


def structure(tree: Any) -> optree.PyTreeSpec:
    """The structure of a tree, without its leaves: hashable and comparable.

    Args:
        tree: a pytree; None is a leaf.

    Returns:
        An ``optree.PyTreeSpec``.

    >>> from torchard import tree
    >>> tree.structure({"w": [1, 2]}) == tree.structure({"w": [3, 4]})
    True
    """
    return optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)


def map(fn: Callable[..., Any], tree: Any, *rests: Any) -> Any:
    """Apply a function to corresponding leaves.

    Args:
        fn: takes one leaf of ``tree``, then what the other trees have at its place.
        tree: a pytree, whose structure the result has.
        rests: further trees; ``tree`` must be a prefix of each, so a leaf of it may face a subtree.

    Returns:
        The tree of results.

    Raises:
        ValueError: the structures differ; the message names the place.

    >>> from torchard import tree
    >>> tree.map(lambda p, g: p - g, {"w": 3, "b": 5}, {"w": 1, "b": 1})
    {'w': 2, 'b': 4}
    >>> tree.map(lambda p, g: p - g, {"w": 3}, {"v": 1})
    Traceback (most recent call last):
        ...
    ValueError: pytree structure error: different pytree keys at key path
        tree 0, mapped with tree 1, at tree tree root
            ...
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
    """Repeat the leaves of a prefix tree, once for each leaf of the full tree.

    Args:
        prefix: a tree that ends where, or before, ``full`` does.
        full: the full tree.
        name: what the message calls ``prefix``.
        what: what the message calls ``full``.
        leaf: what the message calls a leaf of ``prefix``.

    Returns:
        A list, in the order of ``leaves(full)``.

    Raises:
        ValueError: it is not a prefix; the message says where the two part.

    >>> from torchard import tree
    >>> tree.broadcast({"a": 1, "b": 2}, {"a": ["x", "y"], "b": "z"})
    [1, 1, 2]
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
    """Where each leaf is, as one would write it in Python.

    Args:
        tree: a pytree; None is a leaf.
        root: what the paths begin with.

    Returns:
        A list of paths, in the order of `leaves`.

    >>> from torchard import tree
    >>> tree.paths({"w": [1, 2], "b": None}, "params")
    ["params['b']", "params['w'][0]", "params['w'][1]"]
    """
    accessors = optree.tree_accessors(tree, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify(root) for accessor in accessors]


@checked
def register(
    cls: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
    *,
    entry: type[optree.PyTreeEntry] = optree.AutoEntry,
) -> None:
    """Make a type a node of trees, for this library and for torch.

    Args:
        cls: the type.
        flatten: ``flatten(node) -> (children, static)``, where ``static`` is hashable and comparable.
        unflatten: ``unflatten(static, children) -> node``. The children may be of any type.
        entry: how paths go into it: an ``optree.PyTreeEntry`` type.

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
    """Make a dataclass a node of trees. Use it as a decorator, above ``@dataclass``.

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
        raise TypeError(f"{cls.__name__} is no dataclass; write @dataclass below, or use register.")
    fields = dataclasses.fields(cls)
    fixed = tuple(f.name for f in fields if f.metadata.get("static"))
    moving = tuple(f.name for f in fields if not f.metadata.get("static"))

    def flatten(node: Any) -> Any:
        static = tuple(getattr(node, name) for name in fixed)
        return [getattr(node, name) for name in moving], static, moving

    def unflatten(static: Any, children: Sequence[Any]) -> Any:
        # Without the constructor: leaves may be of any type while a tree is mapped.
        node: Any = object.__new__(cls)
        for name, value in zip((*fixed, *moving), (*static, *children), strict=True):
            object.__setattr__(node, name, value)
        return node

    register(cls, flatten, unflatten, entry=optree.DataclassEntry)
    return cls


# -- parts of trees -----------------------------------------------------------------------------------


class _Nothing:
    """The place of a leaf that is in another part: a node without leaves."""

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
    """Split a tree in two by a predicate on leaves; `combine` puts it together again.

    Without a predicate the first part has the floating and complex tensors: what derivatives can be taken
    with respect to. Leaves of the other part appear as ``...``, a node without leaves.

    Args:
        tree: a pytree.
        choose: a predicate on leaves.

    Returns:
        The tree with the leaves that are chosen, and the tree with the others.

    Source: ``equinox.partition``, Kidger, Garcia, arXiv:2111.00254.

    >>> import torch
    >>> from torchard import tree
    >>> params = {"w": torch.tensor(2.0), "layers": 3}
    >>> trained, rest = tree.partition(params)
    >>> trained, rest
    ({'w': tensor(2.), 'layers': ...}, {'w': ..., 'layers': 3})
    >>> torch.func.grad(lambda t: tree.combine(t, rest)["w"] ** rest["layers"])(trained)
    {'w': tensor(12.), 'layers': ...}
    """
    found, shape = flatten(tree)
    flags = [bool(choose(leaf)) for leaf in found]

    def part(chosen: bool) -> Any:
        leaves = [x if flag == chosen else _NOTHING for x, flag in zip(found, flags, strict=True)]
        return unflatten(shape, leaves)

    return part(True), part(False)


def combine(*parts: Any) -> Any:
    """Put together the parts that `partition` made of a tree.

    Args:
        parts: trees of one structure, apart from leaves that are in other parts. The first part that has
            a leaf gives it.

    Returns:
        The whole tree.

    Raises:
        ValueError: the structures differ.

    >>> from torchard import tree
    >>> even, odd = tree.partition({"a": 1, "b": [2, 3]}, lambda n: n % 2 == 0)
    >>> even
    {'a': ..., 'b': [2, ...]}
    >>> tree.combine(even, odd)
    {'a': 1, 'b': [2, 3]}
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


def whole(value: Any) -> Any:
    """A tree with placed values gathered to whole tensors."""
    return optree.tree_map(
        lambda x: x.full() if is_placed(x) else x,
        value,
        is_leaf=is_placed,
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
