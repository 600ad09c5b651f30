"""Which nodes of a pure graph lie in the storage of another, and which are needed for which."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import NAME, OFFLOAD, RECOMPUTE, VAL
from torchard.functional.torch_internals.operators import aten

__all__ = ["base_of", "is_tuple", "is_view", "labels_of", "needed_by", "storage_of", "taken_away"]

# Not marked as one, since it may be taken of a temporary only; in a pure graph nobody can tell.
_UNMARKED = (aten._unsafe_view.default,)


def is_view(node: fx.Node) -> bool:
    """Whether the node's value, or each of a tuple, lies in its operand: free to make again."""
    return bool(getattr(node.target, "is_view", False)) or node.target in _UNMARKED


def is_tuple(node: fx.Node) -> bool:
    """Whether a node has several results; getitem takes them out."""
    return isinstance(VAL.get(node), (tuple, list))


def base_of(node: fx.Node) -> fx.Node | None:
    """What a view, or an item of a tuple of views, lies in; None for a value of its own."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node.all_input_nodes[0] if is_view(node) else None


def storage_of(node: fx.Node) -> fx.Node:
    """The value whose storage a node lies in: itself, unless it is a view."""
    while (base := base_of(node)) is not None:
        node = base
    return node


def labels_of(node: fx.Node) -> list[str]:
    """The labels of a value and of all that lies in its storage, those nearest to it first."""
    aliases = [node]
    for alias in aliases:
        aliases += [user for user in alias.users if user is not node and storage_of(user) is node]
    return list(dict.fromkeys(str(NAME.of(n)) for n in aliases if NAME.on(n)))


def needed_by(roots: Iterable[Any]) -> set[fx.Node]:
    """Everything these depend on, themselves included; what is no node is passed over."""
    stack = [node for node in roots if isinstance(node, fx.Node)]
    found = set(stack)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                stack.append(source)
    return found


def taken_away(program: Program) -> list[fx.Node]:
    """What the forward copies to the host; a backward may copy there what it has made again."""
    return [n for n in program.calls if OFFLOAD.on(n) and not RECOMPUTE.get(n)]
