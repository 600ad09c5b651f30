"""Memory traffic: the bytes that operations move when they run one by one."""

from __future__ import annotations

import operator

from torch import fx

from torchard.functional.core.outputs import tensors_of
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view

__all__ = ["moved", "moves_nothing", "size_of"]


def size_of(node: fx.Node) -> int:
    """The bytes of a node's value; expanded dims count once."""
    total = 0
    for v in tensors_of(VAL.get(node)):
        n = 1
        for size, stride in zip(v.shape, v.stride(), strict=True):
            n *= size if stride else 1
        total += n * v.dtype.itemsize
    return total


def moves_nothing(node: fx.Node) -> bool:
    """Whether a node is a view, or one of several results."""
    return is_view(node) or node.target is operator.getitem


def moved(node: fx.Node) -> int:
    """The bytes that a node reads and writes when it runs by itself; views move none."""
    if moves_nothing(node):
        return 0
    return size_of(node) + sum(size_of(n) for n in node.all_input_nodes)
