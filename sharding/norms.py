"""Norms of trees of placed values, for code outside shard, where a sum over parts misses other ranks'."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import optree
import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import AtLeast, checked
from torchard.functional.core.placed import is_placed
from torchard.functional.engine.transformed import Transformed

__all__ = ["clip_by_global_norm", "global_norm"]


def global_norm(values: Any) -> torch.Tensor:
    """The 2-norm of all leaves of a tree, as if they were one vector.

    Args:
        values: a tree of tensors and MeshTensors. Every value counts once, however it is placed.

    Returns:
        A 0-d tensor, the same on every rank.

    Raises:
        TypeError: a leaf is neither a tensor nor a MeshTensor.

    >>> import torch, torchard as ta
    >>> mesh = ta.Mesh({"tp": 2}, virtual=True)
    >>> ta.global_norm({"w": ta.place(torch.full((4,), 2.0), mesh, ta.P("tp")), "b": torch.tensor([3.0])})
    tensor(5.)
    """
    return _norm(_leaves(values)) if not _any_placed(values) else _on_mesh(_norm)(_leaves(values))


Limit = Annotated[float, AtLeast(0)] | torch.Tensor


@checked
def clip_by_global_norm(values: Any, limit: Limit) -> tuple[Any, torch.Tensor]:
    """Scale a tree down to a global norm of at most ``limit``. Specs do not change.

    Args:
        values: a tree of tensors and MeshTensors, such as gradients.
        limit: the largest norm, a number >= 0 or a 0-d tensor.

    Returns:
        The scaled tree, and its norm before scaling, a 0-d tensor.

    Raises:
        ValueError: ``limit`` is negative, NaN, or a tensor with dims.
        TypeError: a leaf is neither a tensor nor a MeshTensor.

    Source: Pascanu et al., arXiv:1211.5063, section 3.2.

    >>> import torch, torchard as ta
    >>> ta.clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 1.0)
    ({'w': tensor([0.6000, 0.8000])}, tensor(5.))
    """
    if isinstance(limit, torch.Tensor) and limit.ndim:
        raise ValueError(
            f"clip_by_global_norm: limit has shape {list(limit.shape)}; pass one number for all values."
        )
    leaves, structure = optree.tree_flatten(
        values, is_placed, none_is_leaf=True, namespace=tree.NAMESPACE
    )
    clip = _on_mesh(_clip) if _any_placed(values) else _clip
    clipped, norm = clip(leaves, limit)
    return structure.unflatten(clipped), norm


def _leaves(values: Any) -> list[Any]:
    """The leaves of a tree except None."""
    leaves = optree.tree_leaves(values, is_placed, none_is_leaf=True, namespace=tree.NAMESPACE)
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, torch.Tensor) or is_placed(leaf)):
            raise TypeError(
                f"global norm: values has a leaf {leaf!r} of type {type(leaf).__name__}; pass a tree of "
                "tensors and MeshTensors."
            )
    return [leaf for leaf in leaves if leaf is not None]


def _any_placed(values: Any) -> bool:
    return any(is_placed(leaf) for leaf in _leaves(values))


@functools.cache
def _on_mesh(fn: Any) -> Transformed:
    """The function for placed values, whose placements request that it is sharded."""
    return Transformed(fn, ())


def _norm(leaves: list[torch.Tensor]) -> torch.Tensor:
    if not leaves:
        return torch.zeros(())
    squares = [(leaf.abs() ** 2).sum() for leaf in leaves]
    return torch.sqrt(functools.reduce(torch.add, squares))


def _clip(
    leaves: list[Any], limit: float | torch.Tensor
) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    norm = _norm([leaf for leaf in leaves if leaf is not None])
    scale = torch.clamp(limit / (norm + 1e-6), max=1.0)
    return [None if leaf is None else leaf * scale.to(leaf.dtype) for leaf in leaves], norm
