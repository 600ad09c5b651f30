"""Post-passes: order, strides and storage of a graph into which kernels were inserted."""

from __future__ import annotations

import heapq
import operator

import torch
from torch import fx

from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_view, storage_of
from torchard.functional.torch_internals.operators import aten

__all__ = ["each_its_own", "in_any_layout", "in_order"]


def in_order(graph: fx.Graph) -> None:
    """Move nodes after their operands, and otherwise keep the order."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    ready = [(order[n], n) for n in graph.nodes if not waiting[n]]
    heapq.heapify(ready)
    last: fx.Node | None = None
    while ready:
        _, node = heapq.heappop(ready)
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (order[user], user))


def in_any_layout(graph: fx.Graph) -> None:
    """Make views of kernel results valid for any strides, since implementations may choose them.

    The same applies to operations whose results have the strides of their operands.
    """
    todo = [user for node in graph.nodes if isinstance(node.target, Fused) for user in node.users]
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in _STRIDED:
            _lay_out(_storage(node.all_input_nodes[0]))
        elif node.target in _VIEWS:
            node.target = aten.reshape.default
            todo += node.users  # a reshape is still a view where possible
        elif node.target is operator.getitem or is_view(node) or _keeps_layout(node):
            todo += node.users


_VIEWS = (aten.view.default, aten._unsafe_view.default)
_COPIES = (aten.clone.default, aten._to_copy.default)
# as_strided itself is left of inputs only: of computed values it becomes views or an index.
_STRIDED = (aten.as_strided_copy.default, aten.as_strided_scatter.default)


def _keeps_layout(node: fx.Node) -> bool:
    """Whether the result of an operation has the strides of its operand."""
    if node.target in _COPIES:
        return node.kwargs.get("memory_format") in (None, torch.preserve_format)
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _lay_out(value: fx.Node) -> None:
    """Give a value the strides of the trace again, for an operation that addresses its memory."""
    strides = VAL.of(value).stride()
    order = sorted(range(len(strides)), key=lambda d: (-strides[d], d))
    with value.graph.inserting_before(value.next):
        turned = add_call(value, aten.permute.default, value, order)
        packed = _copied(turned)
        back = [order.index(d) for d in range(len(order))]
        restored = add_call(value, aten.permute.default, packed, back)
    value.replace_all_uses_with(restored, delete_user_cb=lambda user: user is not turned)


def _copied(node: fx.Node) -> fx.Node:
    """A contiguous copy of a node's value."""
    # Without its label, which stays with the original.
    order = torch.contiguous_format
    return add_call(node, aten.clone.default, node, val=VAL.of(node), memory_format=order)


def each_its_own(before: Program, program: Program) -> None:
    """Copy results of a program that share storage with each other only because of kernels."""
    output, results = program.graph.output_node(), list(program.results)
    taken: dict[fx.Node, fx.Node] = {}
    for i, (old, new) in enumerate(zip(before.results, results, strict=True)):
        storage, original = _storage(new), _storage(old)
        first = taken.setdefault(storage, original)
        if first is not original or (_beside(storage) and original is old):
            with program.graph.inserting_before(output):
                results[i] = _copied(new)
    output.args = (tuple(results),)


def _storage(node: fx.Node) -> fx.Node:
    """The value whose storage a node shares; reshapes count as views, which most are."""
    while (base := storage_of(node)).target is aten.reshape.default:
        node = base.all_input_nodes[0]
    return base


def _beside(node: fx.Node) -> bool:
    """Whether a node is one of several results that a kernel returns in one buffer."""
    if node.target is not operator.getitem:
        return False
    target = node.all_input_nodes[0].target
    return isinstance(target, Fused) and target.shared_storage
