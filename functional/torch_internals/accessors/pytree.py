"""torch's trees, which its transforms and its results are made of; there is no public module of them.

Trees of the library are optree's (`core/tree.py`). torch's own are read where torch made them.
"""

from __future__ import annotations

from torch.utils._pytree import (
    SUPPORTED_NODES,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "SUPPORTED_NODES",
    "register_pytree_node",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
