"""The precision in which partial sums are reduced over ranks (``reduce_dtype=``).

A bf16 sum over ranks is rounded more often than on one device: the partial products are rounded, then
each partial sum. With a wider dtype the sums and products that end in a reduction are computed in it as
well, and so are operations fused with them, so that the result is rounded once, as on one device.
(Products only on a CPU: elsewhere a product in a different dtype from its operands' is slow, so partial
results are widened after rounding.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.tags import PART_OF
from torchard.sharding.scheduling.collectives import Collective, op_of

__all__ = ["check_reduce_dtype", "reduce_widely"]

_SUMS = (aten.sum.dim_IntList, aten.sum.default)  # they take the dtype of their result
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
_FINISHES = (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)


def check_reduce_dtype(dtype: torch.dtype | None) -> None:
    """Raise ValueError unless it is None or a floating point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"shard(..., reduce_dtype={dtype!r}): sums over ranks are computed in a floating point "
            "dtype, as in reduce_dtype=torch.float32."
        )


def reduce_widely(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Compute sums of narrower floats over ranks in ``dtype``; changes an SPMD graph in place."""
    for node in list(graph.nodes):
        op = op_of(node)
        if op is not None and op.reduction == "sum" and _is_narrower(VAL.of(node), dtype):
            _widen(graph, node, dtype)


def _is_narrower(val: torch.Tensor, dtype: torch.dtype) -> bool:
    return val.dtype.is_floating_point and val.dtype.itemsize < dtype.itemsize


def _widen(graph: fx.Graph, step: fx.Node, dtype: torch.dtype) -> None:
    (source,) = step.all_input_nodes
    narrow: torch.dtype = VAL.of(step).dtype
    whole = PART_OF.get(source)
    wide = _widened(graph, source, dtype) if len(source.users) == 1 else None
    if wide is None:
        with graph.inserting_before(step):
            wide = _cast(source, dtype)
    step.replace_input_with(source, wide)
    VAL.set(step, VAL.of(wide))
    collective: Collective = COLLECTIVE.of(step)
    grown = collective.bytes * dtype.itemsize // narrow.itemsize
    COLLECTIVE.set(step, replace(collective, dtype=dtype, bytes=grown))
    last = _finished(graph, step, whole, dtype)
    users = list(last.users)
    with graph.inserting_after(last):
        back = _cast(last, narrow)
    for user in users:
        user.replace_input_with(last, back)
    while not source.users:
        before = source.all_input_nodes
        graph.erase_node(source)
        source = before[0]


def _finished(graph: fx.Graph, value: fx.Node, whole: int | None, dtype: torch.dtype) -> fx.Node:
    """Also use the wider dtype for operations fused with the sum (a bias, a mean's division)."""
    while len(value.users) == 1:
        (user,) = value.users
        if whole is None or user.target not in _FINISHES or PART_OF.get(user) != whole:
            break
        with graph.inserting_before(user):
            for operand in user.all_input_nodes:
                if operand is not value:
                    user.replace_input_with(operand, _cast(operand, dtype))
        VAL.set(user, VAL.of(user).to(dtype))
        value = user
    return value


def _widened(graph: fx.Graph, source: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """A sum or product used by the reduction only, recomputed in a wider dtype where that is free."""
    with graph.inserting_before(source):
        if source.target in _SUMS:
            kwargs = {**source.kwargs, "dtype": dtype}
            return _emit(source.target, source.args, kwargs, source, dtype)
        if source.target in _FINISHES and len(source.all_input_nodes) == 1:
            (before,) = source.all_input_nodes
            same = len(before.users) == 1 and PART_OF.get(before) == PART_OF.get(source, -1)
            wide = _widened(graph, before, dtype) if same else None
            if wide is None:
                return None
            args = tuple(wide if a is before else a for a in source.args)
            return _emit(source.target, args, source.kwargs, source, dtype)
        if source.target not in _PRODUCTS or VAL.of(source).device.type != "cpu":
            return None
        cast = {operand: _cast(operand, dtype) for operand in source.all_input_nodes}
        args = tuple(cast[operand] for operand in source.args)  # type: ignore[index]
        return _emit(source.target, args, {}, source, dtype)


def _cast(x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return _emit(aten._to_copy.default, (x,), {"dtype": dtype}, x, dtype)


def _emit(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], like: fx.Node, dtype: torch.dtype
) -> fx.Node:
    node = add_call(like, target, *args, val=VAL.of(like).to(dtype), **kwargs)
    LAYOUT.set(node, LAYOUT.of(like))
    return node
