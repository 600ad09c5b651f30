"""The names that a mistyped one may stand for."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = ["nearest"]


def nearest(name: str, names: Sequence[str], count: int = 8) -> list[str]:
    """The names that are most like a given one, nearest first.

    >>> nearest("h.0.mpl", ["h.0.attn", "h.0.mlp", "head"], 2)
    ['h.0.mlp', 'h.0.attn']
    """
    return difflib.get_close_matches(name, names, n=count, cutoff=0.0)
