"""Functions of pytrees: those of optree, with None as a leaf and this library's namespace.

A registered type (`tree_nodes.py`) is also a node of torch's own pytrees, so that torch's transforms
traverse it. Dicts are ordered by key, not by insertion.

::

    @tree.register_dataclass
    @dataclass
    class Params:
        w: Tensor
        steps: Tensor                                       # an integer
        act: str = field(default="gelu", metadata={"static": True})

    trained, rest = tree.partition(params)                  # floating tensors; other leaves
    grads = torch.func.grad(lambda t: loss(tree.combine(t, rest), x))(trained)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch

from torchard.functional.core.arguments import checked
from torchard.functional.core.placed import Lift, is_placed, lift_in_trace
from torchard.functional.core.tensor_spec import is_inexact_dtype
from torchard.functional.core.tree_nodes import NAMESPACE, register, register_dataclass

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


IsLeaf = Callable[[Any], bool] | None


def flatten(tree: Any, *, is_leaf: IsLeaf = None) -> tuple[list[Any], optree.PyTreeSpec]:
    """Split a tree into its leaves and its structure.

    Args:
        tree: a pytree; None is a leaf.
        is_leaf: a predicate on nodes; those for which it holds are leaves.

    Returns:
        The leaves and the structure; ``unflatten(structure, leaves)`` is the tree again.

    >>> from torchard import tree
    >>> leaves, structure = tree.flatten({"w": [1, 2], "b": None})
    >>> leaves
    [None, 1, 2]
    >>> tree.unflatten(structure, leaves)
    {'w': [1, 2], 'b': None}
    """
    return optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def unflatten(structure: optree.PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """Build the tree of a structure from leaves.

    Args:
        structure: a result of `flatten` or `structure`.
        leaves: leaves of any type. ValueError if their number is not that of the structure.

    Returns:
        The tree.

    >>> from torchard import tree
    >>> tree.unflatten(tree.structure({"w": [1, 2]}), "ab")
    {'w': ['a', 'b']}
    """
    return optree.tree_unflatten(structure, leaves)


def leaves(tree: Any, *, is_leaf: IsLeaf = None) -> list[Any]:
    """The leaves of a tree, in the order of `flatten`.

    Args:
        tree: a pytree; None is a leaf.
        is_leaf: a predicate on nodes; those for which it holds are leaves.

    Returns:
        A list.

    >>> from torchard import tree
    >>> tree.leaves({"w": [1, 2], "b": None})
    [None, 1, 2]
    """
    return optree.tree_leaves(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def structure(tree: Any, *, is_leaf: IsLeaf = None) -> optree.PyTreeSpec:
    """The structure of a tree, without its leaves: hashable and comparable.

    Args:
        tree: a pytree; None is a leaf.
        is_leaf: a predicate on nodes; those for which it holds are leaves.

    Returns:
        An ``optree.PyTreeSpec``.

    >>> from torchard import tree
    >>> tree.structure({"w": [1, 2]}) == tree.structure({"w": [3, 4]})
    True
    """
    return optree.tree_structure(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)


def map(fn: Callable[..., Any], tree: Any, *rests: Any, is_leaf: IsLeaf = None) -> Any:
    """Apply a function to corresponding leaves.

    Args:
        fn: takes one leaf of ``tree``, then the corresponding leaves or subtrees of the other trees.
        tree: a pytree, whose structure the result has.
        rests: further trees; ``tree`` must be a prefix of each, so ``fn`` may receive a subtree of them.
        is_leaf: a predicate on nodes; those for which it holds are leaves.

    Returns:
        The tree of results.

    Raises:
        ValueError: the structures differ; the message says where.

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
        tree, rests = lifted(lift, tree), tuple(lifted(lift, rest) for rest in rests)
    try:
        return optree.tree_map(
            fn, tree, *rests, is_leaf=is_leaf, none_is_leaf=True, namespace=NAMESPACE
        )
    except ValueError as error:
        for number, rest in enumerate(rests, 1):
            for problem in optree.prefix_errors(
                tree, rest, is_leaf, none_is_leaf=True, namespace=NAMESPACE
            ):
                raise problem(f"tree 0, mapped with tree {number}, at tree") from error
        raise


def lifted(lift: Lift, tree: Any) -> Any:
    """The tree with its placed values replaced by operands of the trace in progress."""
    return optree.tree_map(
        lambda leaf: lift(leaf) if is_placed(leaf) else leaf,
        tree,
        is_leaf=is_placed,
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def broadcast(
    prefix: Any,
    full: Any,
    name: str = "prefix",
    what: str = "the tree",
    leaf: str = "value",
    *,
    is_leaf: IsLeaf = None,
) -> list[Any]:
    """Repeat each leaf of a prefix tree for every leaf of the full tree below it.

    Args:
        prefix: a tree whose leaves are leaves or subtrees of ``full``.
        full: the full tree.
        name: the name of ``prefix`` in the message.
        what: the name of ``full`` in the message.
        leaf: the name of a leaf of ``prefix`` in the message.
        is_leaf: a predicate on nodes; those for which it holds are leaves.

    Returns:
        A list, in the order of ``leaves(full)``.

    Raises:
        ValueError: ``prefix`` is not a prefix; the message says where the two differ.

    >>> from torchard import tree
    >>> tree.broadcast({"a": 1, "b": 2}, {"a": ["x", "y"], "b": "z"})
    [1, 1, 2]
    """
    try:
        spread: list[Any] = optree.broadcast_prefix(
            prefix, full, is_leaf, none_is_leaf=True, namespace=NAMESPACE
        )
    except ValueError as error:
        raise ValueError(_misfit(prefix, full, name, what, leaf)) from error
    return spread


def _misfit(prefix: Any, full: Any, name: str, what: str, leaf: str) -> str:
    # Nodes that differ only in their static data differ at the root.
    path, one, other = _parting(prefix, full, "") or ("", prefix, full)
    return (
        f"{name} is not a prefix of {what}: {name}{path} is {_described(one)}, and {what}{path} is "
        f"{_described(other)}. Give every leaf a {leaf}, or one {leaf} for a whole subtree."
    )


def _parting(prefix: Any, full: Any, path: str) -> tuple[str, Any, Any] | None:
    """Where a tree is no prefix of another, and the nodes of both there; None if it is one."""
    if optree.tree_is_leaf(prefix, none_is_leaf=True, namespace=NAMESPACE):
        return None
    ours, theirs = _children(prefix), _children(full)
    alike = type(prefix) is type(full) or (isinstance(prefix, dict) and isinstance(full, dict))
    if not alike or ours.keys() != theirs.keys():
        return path, prefix, full
    found = (_parting(child, theirs[entry], path + entry) for entry, child in ours.items())
    return next((parting for parting in found if parting is not None), None)


def _children(node: Any) -> dict[str, Any]:
    """The children of a node, by what follows the node's path in theirs."""
    if optree.tree_is_leaf(node, none_is_leaf=True, namespace=NAMESPACE):
        return {}
    below: Any = {"is_leaf": lambda x: x is not node, "none_is_leaf": True, "namespace": NAMESPACE}
    accessors, children = optree.tree_accessors(node, **below), optree.tree_leaves(node, **below)
    return {a.codify(""): child for a, child in zip(accessors, children, strict=True)}


def _described(node: Any) -> str:
    """A description of a node: its kind, and the names of its children."""
    if optree.tree_is_leaf(node, none_is_leaf=True, namespace=NAMESPACE):
        return "a leaf"
    if isinstance(node, dict):
        return f"a dict with {', '.join(repr(key) for key in node) or 'no keys'}"
    if type(node) in (list, tuple):
        return f"a {type(node).__name__} of {len(node)}"
    return f"a {type(node).__name__}"


def paths(tree: Any, root: str = "", *, is_leaf: IsLeaf = None) -> list[str]:
    """The path of each leaf, as a Python expression.

    Args:
        tree: a pytree; None is a leaf.
        root: the text with which the paths begin.
        is_leaf: a predicate on nodes; those for which it holds are leaves.

    Returns:
        A list of paths, in the order of `leaves`.

    >>> from torchard import tree
    >>> tree.paths({"w": [1, 2], "b": None}, "params")
    ["params['b']", "params['w'][0]", "params['w'][1]"]
    """
    accessors = optree.tree_accessors(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    return [accessor.codify(root) for accessor in accessors]


# -- parts of trees -----------------------------------------------------------------------------------


class _Nothing:
    """The replacement of a leaf that is in the other tree: a node without leaves."""

    def __repr__(self) -> str:
        return "..."

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return hash(_Nothing)


_NOTHING = _Nothing()
register(_Nothing, lambda node: ((), None), lambda static, children: _NOTHING)


def _is_floating(leaf: Any) -> bool:
    known = isinstance(leaf, torch.Tensor) or is_placed(leaf)
    return known and is_inexact_dtype(leaf.dtype)


@checked
def partition(
    tree: Any, choose: Callable[[Any], Any] = _is_floating, *, is_leaf: IsLeaf = None
) -> tuple[Any, Any]:
    """Split a tree in two by a predicate on leaves; `combine` is the inverse.

    By default the first tree has the floating and complex tensors, which can be differentiated. In each
    tree, leaves of the other one are replaced by ``...``, a node without leaves.

    Args:
        tree: a pytree.
        choose: a predicate on leaves.
        is_leaf: a predicate on nodes; those for which it holds are leaves.

    Returns:
        The tree with the leaves for which the predicate holds, and the tree with the others.

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
    all_leaves, shape = flatten(tree, is_leaf=is_leaf)
    flags = [bool(choose(leaf)) for leaf in all_leaves]

    def part(chosen: bool) -> Any:
        kept = [
            leaf if flag == chosen else _NOTHING
            for leaf, flag in zip(all_leaves, flags, strict=True)
        ]
        return unflatten(shape, kept)

    return part(True), part(False)


def combine(*parts: Any) -> Any:
    """Combine the trees into which `partition` split a tree.

    Args:
        parts: trees of the same structure, except for leaves that are missing. Each leaf comes from the
            first tree that has it.

    Returns:
        The complete tree.

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
        is_leaf=lambda x: x is _NOTHING or is_placed(x),
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def whole(value: Any) -> Any:
    """The tree with its placed values gathered to full tensors."""
    return optree.tree_map(
        lambda x: x.full() if is_placed(x) else x,
        value,
        is_leaf=is_placed,
        none_is_leaf=True,
        namespace=NAMESPACE,
    )
