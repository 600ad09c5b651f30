"""Sums over ranks that are added are added before they are reduced.

A sum over ranks is linear, so each rank can add its terms of several sums, and the total is reduced once:
one collective for the two products of a parallel block (GPT-J), of the size of one. A plan keeps sums
pending for as long as every operation between is linear, but a bias that is added to one of them is not
(each rank would add it). What is added between is left where it is.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from torchard.functional.programs.graphs import Inserter, add_call, frozen
from torchard.functional.programs.tags import LAYOUT, LOOP, NAME, SEGMENTS, STEP, VAL
from torchard.functional.remat.segments import segments_of, shared_segments
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.tags import CHUNK
from torchard.sharding.planning.aliases import is_alias
from torchard.sharding.scheduling.collectives import op_of

__all__ = ["add_before_reducing"]


_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class _Term:
    """A reduced sum that reaches a larger sum by additions and views.

    Attributes:
        step: the reduction.
        views: the views between, as calls without their operand.
        view: what the first addition above reads: the reduction or a view of it.
    """

    step: fx.Node
    views: tuple[Hashable, ...]
    view: fx.Node

    @property
    def key(self) -> Hashable:
        """What terms share that are reduced alike and viewed alike."""
        val: torch.Tensor = VAL.of(self.step)
        place = LOOP.get(self.step), CHUNK.get(self.step)
        return STEP.of(self.step), self.views, val.shape, val.dtype, *place

    @property
    def addition(self) -> fx.Node:
        (user,) = self.view.users
        return user


def add_before_reducing(graph: fx.Graph) -> None:
    """Reduce sums that are added by one step, in place."""
    for root in reversed(list(graph.nodes)):
        if not root.users or not _adds(root) or _is_inner(root):
            continue
        groups: dict[Hashable, list[_Term]] = {}
        for term in _terms(root):
            groups.setdefault(term.key, []).append(term)
        for terms in groups.values():
            if len(terms) > 1:
                _reduce_once(sorted(terms, key=lambda term: term.step))


def _adds(node: fx.Node) -> bool:
    """Whether a node adds two tensors, and nothing must keep its value."""
    plain = node.target is aten.add.Tensor and not node.kwargs and not _is_kept(node)
    return plain and len(node.all_input_nodes) == 2


def _is_kept(node: fx.Node) -> bool:
    """Whether the policy of a checkpointed segment names the value."""
    return any(NAME.get(node) in segment.policy.labels for segment in segments_of(node))


def _is_inner(node: fx.Node) -> bool:
    """Whether the value of a sum is only added to others, so that it belongs to a larger sum."""
    while len(node.users) == 1:
        (user,) = node.users
        if _adds(user):
            return _is_term(node, user)
        if not _is_view(user):
            break
        node = user
    return False


def _is_term(node: fx.Node, total: fx.Node) -> bool:
    """Whether an operand has the shape, dtype and loop of the sum."""
    have, want = VAL.of(node), VAL.of(total)
    same: bool = (have.shape, have.dtype) == (want.shape, want.dtype)
    return same and LOOP.get(node) is LOOP.get(total)


def _is_view(node: fx.Node) -> bool:
    return is_alias(node) and node.target is not operator.getitem and not _is_kept(node)


def _view_key(node: fx.Node) -> Hashable:
    """The call of a view without its operand; a reshape of any kind is known by its shape."""
    if node.target in _RESHAPES:
        shape: torch.Size = VAL.of(node).shape
        return shape
    return node.target, frozen(node.args[1:]), frozen(node.kwargs)


def _before(view: Hashable, views: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """Views and one below them; of adjacent reshapes the last one decides."""
    overruled = isinstance(view, torch.Size) and views and isinstance(views[0], torch.Size)
    return views if overruled else (view, *views)


def _terms(total: fx.Node, views: tuple[Hashable, ...] = ()) -> Iterator[_Term]:
    """The reductions among the terms of a sum."""
    for operand in total.all_input_nodes:
        node, found = operand, views
        if len(operand.users) > 1 or not _is_term(operand, total):
            continue
        while _is_view(node) and len(node.all_input_nodes[0].users) == 1:
            found = _before(_view_key(node), found)
            node = node.all_input_nodes[0]
        if LOOP.get(node) is not LOOP.get(total) or _is_kept(node):
            continue
        op = op_of(node)
        if op is not None and op.reduction == "sum":
            yield _Term(node, found, operand)
        elif _adds(node):
            yield from _terms(node, found)


def _reduce_once(terms: list[_Term]) -> None:
    """Let the last of some reductions, in order, also reduce the terms of the others."""
    *earlier, last = terms
    (total,) = earlier[0].step.all_input_nodes
    for one, other in zip(earlier, terms[1:], strict=True):
        (addend,) = other.step.all_input_nodes
        with total.graph.inserting_before(other.step):
            sum_ = add_call(other.step, aten.add.Tensor, total, addend, val=VAL.of(addend))
        LAYOUT.set(sum_, LAYOUT.of(addend))
        _share_segments(sum_, total)
        total = sum_
        _leave_out(one)
    last.step.replace_input_with(last.step.all_input_nodes[0], total)
    _share_segments(last.step, total)


def _share_segments(node: fx.Node, other: fx.Node) -> None:
    """Put a node only into those checkpointed segments that a second one is in, too."""
    mine = segments_of(node)
    if SEGMENTS.on(node):
        SEGMENTS.set(node, mine[: shared_segments(mine, segments_of(other))])


def _leave_out(term: _Term) -> None:
    """Replace the sum of a term and a rest by the rest, in the dtype and the shape of the sum."""
    addition = term.addition
    (rest,) = (node for node in addition.all_input_nodes if node is not term.view)
    have, want = VAL.of(rest), VAL.of(addition)
    if (have.dtype, have.device) != (want.dtype, want.device):  # small integers would wrap
        layout, options = LAYOUT.of(rest), {"dtype": want.dtype, "device": want.device}
        rest = Inserter(addition)(aten._to_copy.default, rest, **options)
        LAYOUT.set(rest, layout)
    if have.shape != want.shape:
        rest = Inserter(addition)(aten.expand.default, rest, list(want.shape), val=want)
        LAYOUT.set(rest, LAYOUT.of(addition))
    addition.replace_all_uses_with(rest)
    addition.graph.erase_node(addition)
    node = term.view
    while not node.users:
        (before,) = node.all_input_nodes
        node.graph.erase_node(node)
        node = before
