"""Rewrites sums so that pending terms are reduced over ranks once.

A leading zero term is dropped: zeros are replicated, so every pending term would be reduced before it is
added to the zeros. Gradients of slices are summed before they are padded with zeros, so a slice that is
used several times has one gradient, of the slice's size.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import fx

from torchard.functional.programs.constants import is_zero
from torchard.functional.programs.graphs import Inserter, substitute
from torchard.functional.programs.tags import NAME, VAL
from torchard.functional.torch_internals.operators import aten

__all__ = ["fold_sums"]

_SUMS = (aten.add.Tensor, aten.sub.Tensor)
# Operations that place their first argument in a tensor of zeros.
_PADDED = (
    aten.diagonal_backward.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.unfold_backward.default,
)
_VIEWS = (
    aten._unsafe_view.default,
    aten.permute.default,
    aten.reshape.default,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
)


def fold_sums(graph: fx.Graph) -> None:
    """Rewrite the sums of a graph in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _SUMS and not node.kwargs:
            rest = _without_zero(node)
            if rest is None:
                _pad_once(graph, node)
            else:
                substitute(node, rest)


def _without_zero(node: fx.Node) -> fx.Node | None:
    """The other term of a sum with zero, if it has the sum's shape and dtype."""
    one, other = node.args
    terms = [(one, other)] if node.target is aten.sub.Tensor else [(one, other), (other, one)]
    for term, zero in terms:
        if isinstance(term, fx.Node) and isinstance(zero, fx.Node) and is_zero(zero):
            have, want = VAL.of(term), VAL.of(node)
            if have.shape == want.shape and have.dtype == want.dtype and term.op != "placeholder":
                return term
    return None


def _pad_once(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite a sum of two terms with the same padding as the padded sum."""
    one, other = node.args
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or one is other:
        return
    source = one.args[0] if one.args else None
    padded = one.target in _PADDED or (
        one.target in _VIEWS and isinstance(source, fx.Node) and source.target in _PADDED
    )
    labels = NAME.on(one) or NAME.on(other)
    if not padded or labels or _key(one) != _key(other) or len(one.users) + len(other.users) > 2:
        return
    first, second = one.all_input_nodes[0], other.all_input_nodes[0]
    insert = Inserter(node)
    total = insert(node.target, first, second, val=VAL.of(first))
    substitute(node, insert(one.target, total, *one.args[1:], val=VAL.of(node)))
    graph.erase_node(one)
    graph.erase_node(other)
    _pad_once(graph, total)


def _key(node: fx.Node) -> Hashable:
    """A key that is equal for calls with the same padding, operand shape and operand dtype."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return node
    val = VAL.of(node.args[0])
    if not isinstance(val, torch.Tensor):  # one of several results
        return node
    return node.target, repr(node.args[1:]), repr(node.kwargs), val.shape, val.dtype
