"""Casts around collectives: a value is sent in the narrower of two dtypes, and kept in it.

A cast of every element commutes exactly with a move of elements. It does not commute with a sum, whose
dtype is never changed: a cast of a sum waits, as views do, so that sums can be merged (`schedule.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, LOOP, NAME, STEP, VAL
from torchard.functional.torch_internals.operators import aten, prims
from torchard.sharding.layouts.collective_ops import AllGather, AllReduce, AllToAll, PsumScatter
from torchard.sharding.layouts.tags import BUCKET
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.scheduling.bucket import common
from torchard.sharding.scheduling.collectives import Collective, op_of

__all__ = ["is_cast", "is_cheap", "narrow_in_turn", "send_narrowly"]

_CASTS = (aten._to_copy.default, prims.convert_element_type.default)
_MOVES = (AllGather, AllToAll)


def is_cast(node: fx.Node) -> bool:
    """Whether a node only converts its operand to another dtype."""
    if node.op != "call_function" or node.target not in _CASTS:
        return False
    before, after = VAL.of(node.all_input_nodes[0]), VAL.of(node)
    return before.dtype != after.dtype and (before.device, before.layout) == (after.device, after.layout)


def is_cheap(node: fx.Node) -> bool:
    """Whether a node is a view or a cast, which may be repeated."""
    return is_alias(node) or is_cast(node)


def _narrows(node: fx.Node) -> bool:
    """Whether a node is a cast whose result takes less memory than its operand."""
    return is_cast(node) and _bytes_each(node) < _bytes_each(node.all_input_nodes[0])


def _bytes_each(node: fx.Node) -> int:
    return int(VAL.of(node).dtype.itemsize)


def send_narrowly(graph: fx.Graph) -> None:
    """Move casts that widen behind the gathers of their results, and casts that narrow before gathers."""
    for step in list(graph.nodes):
        if isinstance(op_of(step), _MOVES):
            (source,) = step.all_input_nodes
            if is_cast(source) and _bytes_each(source) > _bytes_each(source.all_input_nodes[0]):
                _cast_after(step, source)
            elif step.users and all(_narrows_to(user, min(step.users)) for user in step.users):
                _cast_before(step, source)


def _narrows_to(node: fx.Node, first: fx.Node) -> bool:
    """Whether a node narrows its operand to the dtype of its first user, and has no label to keep."""
    same: bool = _narrows(node) and VAL.of(node).dtype == VAL.of(first).dtype
    return same and not NAME.on(node)


def _cast_after(step: fx.Node, cast: fx.Node) -> None:
    graph, (narrow,) = step.graph, cast.all_input_nodes
    users = list(step.users)
    moved = _same_step(narrow, step)
    if moved is None:
        moved = step
        _send_instead(step, narrow)
    with graph.inserting_after(step):
        again = _repeated(cast, moved, step)
    for user in users:
        user.replace_input_with(step, again)
    for node in (step, cast):
        if not node.users:
            graph.erase_node(node)


def _same_step(value: fx.Node, like: fx.Node) -> fx.Node | None:
    """A step that moves a value as another step does, before that one."""
    for user in value.users:
        same = STEP.get(user) == STEP.of(like) and LOOP.get(user) is LOOP.get(like)
        if same and user < like:
            return user
    return None


def _cast_before(step: fx.Node, source: fx.Node) -> None:
    graph, casts = step.graph, list(step.users)
    with graph.inserting_before(step):
        narrow = _repeated(casts[0], source, step)
    _send_instead(step, narrow)
    for cast in casts:
        cast.replace_all_uses_with(step)
        graph.erase_node(cast)


def _repeated(cast: fx.Node, value: fx.Node, near: fx.Node) -> fx.Node:
    """A cast of another value, at the insertion point, in the place of a step."""
    options: dict[str, Any] = dict(cast.kwargs)
    new = add_call(near, cast.target, value, *cast.args[1:], val=VAL.of(cast), **options)
    LAYOUT.set(new, LAYOUT.of(value))
    return new


def _send_instead(step: fx.Node, value: fx.Node) -> None:
    """Let a step move a value of another dtype."""
    before: Collective = COLLECTIVE.of(step)
    each = _bytes_each(step)
    step.replace_input_with(step.all_input_nodes[0], value)
    VAL.set(step, VAL.of(value))
    sent = before.bytes * _bytes_each(value) // each
    COLLECTIVE.set(step, replace(before, dtype=VAL.of(value).dtype, bytes=sent))


def narrow_in_turn(graph: fx.Graph) -> None:
    """Move casts that narrow a sum up, to where the second bucket after its own is issued.

    The sum has arrived by then, and is not held in the wider dtype until its first use, the update.
    """
    kinds: dict[tuple[Any, ...], dict[Any, list[fx.Node]]] = {}
    for node in graph.nodes:
        op = op_of(node)
        if isinstance(op, (AllReduce, PsumScatter)) and not LOOP.on(node):
            buckets = kinds.setdefault((type(op), *common(node)), {})
            buckets.setdefault(BUCKET.get(node, node), []).append(node)
    for buckets in kinds.values():
        order = list(buckets.values())
        for members, second in zip(order, order[2:], strict=False):
            for node in (node for member in members for node in _until_narrow(member)):
                if second[0] < node:
                    second[0].prepend(node)


def _until_narrow(value: fx.Node) -> list[fx.Node]:
    """The casts that narrow a value, and the views between; operands first."""
    found: list[fx.Node] = []
    for user in value.users:
        if _narrows(user):
            found.append(user)
        elif is_alias(user) and (behind := _until_narrow(user)):
            found += [user, *behind]
    return found
