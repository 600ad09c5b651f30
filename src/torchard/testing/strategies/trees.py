"""Pytrees, and keys of random numbers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from torchard.functional import random
from torchard.functional.core.arguments import checked

__all__ = ["keys", "pytrees"]

_NAMES = ("a", "b", "c")


@checked
def pytrees(leaves: st.SearchStrategy[Any], *, max_leaves: int = 6) -> st.SearchStrategy[Any]:
    """A hypothesis strategy of pytrees: nested dicts, lists and tuples, some of them empty.

    Args:
        leaves: a strategy of leaves; None may be one.
        max_leaves: approximately the maximum number of leaves of a tree.

    Returns:
        A strategy of pytrees, which shrinks towards a single leaf.

    >>> from hypothesis import find, strategies as st
    >>> from torchard.testing import strategies as ts
    >>> find(ts.pytrees(st.integers()), lambda tree: isinstance(tree, dict) and len(tree) == 2)
    {'a': 0, 'b': 0}
    """
    return st.recursive(leaves, _nodes, max_leaves=max_leaves)


def _nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=3)
    dicts = st.dictionaries(st.sampled_from(_NAMES), children, max_size=len(_NAMES))
    return lists | lists.map(tuple) | dicts


def keys() -> st.SearchStrategy[torch.Tensor]:
    """A hypothesis strategy of keys, as `torchard.random.key` makes them.

    Returns:
        A strategy of tensors int64 ``[2]``, which shrinks towards ``key(0)``.

    >>> from hypothesis import find
    >>> from torchard import random
    >>> from torchard.testing import strategies as ts
    >>> find(ts.keys(), lambda key: True)
    tensor([0, 0])
    """
    return st.builds(random.key, st.integers(0, 2**32 - 1))
