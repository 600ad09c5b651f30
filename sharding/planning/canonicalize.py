"""Canonicalisation of a traced program before its layouts are chosen.

Creation and filling no longer depend on tensors of which only the shape is read: ``zeros_like`` of a
sharded value must not move the value. Strided regions of memory become views (``strided.py``), rows and
slices of one value are grouped (``cuts.py``), sums are rewritten so that they are reduced once
(``sums.py``) or from the end, equal views are merged (so that a reshard of their base is shared), empty
operands of concatenations are dropped, and dead code is eliminated.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.constants import fill_with, release_constants
from torchard.functional.programs.graphs import Inserter, substitute
from torchard.functional.programs.tags import LOOP, RECOMPUTE, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.planning.cuts import gather_cuts
from torchard.sharding.planning.strided import unstride
from torchard.sharding.planning.sums import fold_sums
from torchard.sharding.rules import lookup
from torchard.sharding.rules.compute.scan import fold_flips

__all__ = ["prepare"]


def prepare(graph: fx.Graph) -> fx.Graph:
    """Canonicalise a graph in place, and return it."""
    _lift_numbers(graph)
    unstride(graph)
    release_constants(graph.nodes)
    for node in list(graph.nodes):
        if _is_empty_cut(node):
            fill_with(node, 0)
        elif node.target is aten.cat.default:
            _drop_empty_operands(node)
        elif node.target is aten.index_put.default:
            _expand_written(node)
    fold_sums(graph)
    gather_cuts(graph)
    fold_flips(graph)
    _share_views(graph)
    graph.eliminate_dead_code()
    return graph


def _lift_numbers(graph: fx.Graph) -> None:
    """Turn numbers that are an operation's only operand into tensors: ``conj(1 + 2j)``.

    Derivatives of products with a number leave such calls; no factor rule covers a call without operands.
    """
    for node in list(graph.nodes):
        if not isinstance(node.target, internals.OpOverload) or node.all_input_nodes:
            continue
        for k, given in enumerate(internals.schema(node.target).arguments[: len(node.args)]):
            number = node.args[k]
            if str(given.type) == "Tensor" and isinstance(number, (bool, int, float, complex)):
                val = torch.tensor(number)
                if isinstance(number, (float, complex)):  # the dtype that autograd gives numbers
                    val = val.to(torch.complex128 if isinstance(number, complex) else torch.float64)
                kind = {"dtype": val.dtype, "device": VAL.of(node).device}
                empty = VAL.of(node).new_empty([], dtype=val.dtype)
                full = Inserter(node)(aten.full.default, [], number, val=empty, **kind)
                node.update_arg(k, full)


def _is_empty_cut(node: fx.Node) -> bool:
    """Whether a node is an empty slice or its gradient; these nodes need no gather of their operand."""
    if node.target is aten.slice.Tensor:
        return 0 in VAL.of(node).shape
    source = node.args[0] if node.target is aten.slice_backward.default else None
    return isinstance(source, fx.Node) and 0 in VAL.of(source).shape


def _drop_empty_operands(node: fx.Node) -> None:
    """Drop a concatenation's operands that have no elements.

    An operand of shape [0] may occur with operands of any rank, so it cannot be split like them.
    """
    whole = VAL.of(node)
    if not whole.numel():
        fill_with(node, 0)
        return
    given: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    filled = [x for x in given if VAL.of(x).numel()]
    if len(filled) < len(given):
        insert = Inserter(node)
        cast = [x if VAL.of(x).dtype == whole.dtype else _cast(insert, x, whole.dtype) for x in filled]
        substitute(node, insert(aten.cat.default, cast, dim))


def _expand_written(node: fx.Node) -> None:
    """Expand the values written to indexed elements to one for each element, as rules require."""
    operands: Any = fx.map_arg(node.args[:3], VAL.of)
    table, indices, values = operands
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return
    with internals.no_modes():
        shape = list(aten.index.Tensor(table, indices).shape)
    if list(values.shape) != shape:
        node.update_arg(2, Inserter(node)(aten.expand.default, node.args[2], shape))


def _cast(insert: Inserter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return insert(aten._to_copy.default, node, dtype=dtype)


def _share_views(graph: fx.Graph) -> None:
    known: dict[Hashable, fx.Node] = {}
    for node in list(graph.nodes):
        key = _view_key(node)
        if key is None:
            continue
        first = known.setdefault(key, node)
        if first is not node:
            substitute(node, first)


def _view_key(node: fx.Node) -> Hashable | None:
    if node.op != "call_function" or node.kwargs:
        return None
    rule = lookup(node.target)
    if node.target is not operator.getitem and (rule is None or not rule.alias):
        return None
    # A loop's view of a value that all iterations share is not read outside the loop.
    loop = None if LOOP.on(node.all_input_nodes[0]) else LOOP.get(node)
    return node.target, _frozen(node.args), RECOMPUTE.get(node), loop


def _frozen(value: Any) -> Hashable:
    return tuple(map(_frozen, value)) if isinstance(value, (tuple, list)) else value
