"""Operands of which each iteration looks up its own row: they are operands of rows.

In a trace, ``table[index]`` with the number of the iteration is a lookup by a tensor, which copies the
row. Its gradient is as large as the table in each iteration. The rows of an operand are views, and have
gradients of their own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from torchard.functional.loops.call import Takes
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten

__all__ = ["take_rows"]


def take_rows(body: Program, takes: Sequence[Takes], index: int, count: int) -> tuple[Takes, ...]:
    """What the inputs of a body are, in which shared ones become rows if only their rows are read.

    Args:
        body: the body, whose graph is changed.
        index: the position of the input that is the number of the iteration.
        count: the number of iterations.
    """
    nodes = body.placeholders
    found = list(takes)
    for i, node in enumerate(nodes):
        users = list(node.users)
        if takes[i] != "shared" or not users or body.retrace is not None:
            continue
        if VAL.of(node).shape[:1] == (count,) and all(_is_row(u, node, nodes[index]) for u in users):
            found[i] = "row"
            VAL.set(node, VAL.of(users[0]))
            for user in users:
                user.replace_all_uses_with(node)
                body.graph.erase_node(user)
    return tuple(found)


def _is_row(node: fx.Node, table: fx.Node, index: fx.Node) -> bool:
    """Whether a node is the row of a table with the number of the iteration."""
    if node.target is not aten.index.Tensor or node.args[0] is not table:
        return False
    at: Any = node.args[1]
    return bool(at[0] is index and all(each is None for each in at[1:]))
