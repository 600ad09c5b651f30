"""torch's pytrees, which its transforms and some results use; they have no public module.

The library's own trees are optree's (`core/tree.py`).
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
