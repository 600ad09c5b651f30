"""Lookups that stand for views."""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

__all__ = ["Picked"]


class Picked(NamedTuple):
    """A lookup that stands for a view."""

    node: fx.Node
    source: fx.Node
