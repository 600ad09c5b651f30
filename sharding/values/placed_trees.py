"""Trees for users, to whom a placed value is one leaf; this library's own functions look into it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torchard.functional.core import tree as trees
from torchard.functional.core.placed import is_placed, lift_in_trace

__all__ = ["full", "placed_as_leaves"]

T = TypeVar("T")


def full(tree: Any) -> Any:
    """The tree with its placed values gathered to full tensors.

    Args:
        tree: a pytree.

    Returns:
        The tree with a tensor in place of each MeshTensor; other leaves are unchanged.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> params = ta.place({"w": torch.arange(4), "b": torch.ones(2)}, mesh, ta.P("tp"))
    >>> ta.full(params)
    {'w': tensor([0, 1, 2, 3]), 'b': tensor([1., 1.])}
    """
    lift = lift_in_trace()
    return trees.whole(tree) if lift is None else trees.lifted(lift, tree)


def placed_as_leaves(function: Callable[..., T]) -> Callable[..., T]:
    """A function of trees that does not look into placed values; in a trace they are traced tensors."""

    @functools.wraps(function)
    def call(*args: Any, is_leaf: Callable[[Any], bool] | None = None, **kwargs: Any) -> T:
        lift = lift_in_trace()
        if lift is not None:
            args = tuple(trees.lifted(lift, arg) for arg in args)

        def stops(node: Any) -> bool:
            return is_placed(node) or (is_leaf is not None and is_leaf(node))

        return function(*args, is_leaf=stops, **kwargs)

    return call
