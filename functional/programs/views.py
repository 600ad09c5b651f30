"""Storages and dependencies in a pure graph: views and their bases, and the ancestors of a value."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.loops import handed_on, iterating
from torchard.functional.programs.markers import again, enter, leave
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import LOOP, NAME, OFFLOAD, RECOMPUTE, VAL
from torchard.functional.torch_internals.operators import aten

__all__ = [
    "are_dense",
    "base_of",
    "depending_on",
    "forward_offloads",
    "handed_value",
    "is_dense",
    "is_tuple",
    "is_view",
    "labels_of",
    "needed_by",
    "storage_of",
    "sweep",
]

# A view that torch does not mark as one, as it is for temporaries only; a pure graph has no others.
_UNMARKED = (aten._unsafe_view.default,)


def is_view(node: fx.Node) -> bool:
    """Whether the node's value, or each item of a tuple, is a view of its operand: free to recompute."""
    return bool(getattr(node.target, "is_view", False)) or node.target in _UNMARKED


def is_dense(val: torch.Tensor) -> bool:
    """Whether some order of its dims makes a tensor contiguous: no gaps, no two elements in one place."""
    return val.is_contiguous() or are_dense(val.shape, val.stride())


def are_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """The same of a tensor of these sizes and strides."""
    count = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride != count:
            return 0 in sizes
        count *= size
    return True


def is_tuple(node: fx.Node) -> bool:
    """Whether a node returns a tuple, whose items are getitem nodes."""
    return isinstance(VAL.get(node), (tuple, list))


def base_of(node: fx.Node) -> fx.Node | None:
    """The base of a view, or of an item of a tuple of views; None if it is no view."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node.all_input_nodes[0] if is_view(node) else None


def storage_of(node: fx.Node) -> fx.Node:
    """The node that allocates the storage of a node's value: itself, unless it is a view."""
    while (base := base_of(node)) is not None:
        node = base
    return node


def handed_value(node: fx.Node) -> fx.Node:
    """The value that iterations pass on, for a carry's node (`enter`, `again`, `leave`); else the node.

    A carry is saved, recomputed or offloaded like this value: in all iterations, or in none.
    """
    entered: Any = node
    if node.target is leave:
        entered = node.all_input_nodes[0].args[1]
    elif node.target is again:
        entered = node.args[1]
    for handing in handed_on(entered):
        value: Any = handing.args[0]
        if LOOP.get(value) is LOOP.of(entered) and value.target is not enter:
            return storage_of(value)
    return node


def labels_of(node: fx.Node) -> list[str]:
    """The labels of a value and of its views, in breadth-first order."""
    aliases = [node]
    for alias in aliases:
        aliases += [user for user in alias.users if user is not node and storage_of(user) is node]
    return list(dict.fromkeys(str(NAME.of(n)) for n in aliases if NAME.on(n)))


def needed_by(roots: Iterable[Any]) -> set[fx.Node]:
    """The nodes that these depend on, themselves included; other objects are ignored.

    What enters an iteration of a loop depends on what the one before handed on.
    """
    return _reached(roots, lambda node: (*node.all_input_nodes, *iterating(node)))


def depending_on(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on these, themselves included."""
    return _reached(roots, lambda node: node.users)


def _reached(roots: Iterable[Any], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    stack = [node for node in roots if isinstance(node, fx.Node)]
    reached = set(stack)
    while stack:
        for node in following(stack.pop()):
            if node not in reached:
                reached.add(node)
                stack.append(node)
    return reached


def sweep(graph: fx.Graph) -> None:
    """Eliminate dead code of a pure graph; a carry of a loop that only hands itself on is dead too."""
    needed = needed_by([graph.output_node()])
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and node not in needed:
            graph.erase_node(node)


def forward_offloads(program: Program) -> list[fx.Node]:
    """The offloads of the forward, without those of values that a backward recomputes."""
    return [n for n in program.calls if OFFLOAD.on(n) and not RECOMPUTE.get(n)]
