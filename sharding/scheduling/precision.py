"""In which precision partial sums cross the network (``reduce_dtype=``).

A sum over ranks of bf16 is rounded once more for each rank: the partial products are, and then their
sums. With a wider dtype the sums and products that end in a reduction are made in it as well, and so is
what was one operation with them, so that it is rounded once, as one device rounds it. (Products on a CPU
only: elsewhere one in another dtype than its operands' would be slow; there partial results are widened
after they were rounded.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.tagging import inherit, put
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.tags import PART_OF
from torchard.sharding.scheduling.collectives import Collective, op_of

__all__ = ["check_reduce_dtype", "reduce_widely"]

_SUMS = (aten.sum.dim_IntList, aten.sum.default)  # which take the dtype of their result
_PRODUCTS = (aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
_FINISHES = (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)


def check_reduce_dtype(dtype: torch.dtype | None) -> None:
    """Raises ValueError unless it is None or a floating point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"shard(..., reduce_dtype={dtype!r}): sums over ranks are made in a floating point dtype, "
            "as in reduce_dtype=torch.float32."
        )


def reduce_widely(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Make the sums over ranks of narrower floats in ``dtype``; in place, on an SPMD graph."""
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
    wide = _made_wide(graph, source, dtype) if len(source.users) == 1 else None
    if wide is None:
        with graph.inserting_before(step):
            wide = _cast(graph, source, dtype)
    step.replace_input_with(source, wide)
    VAL.set(step, VAL.of(wide))
    collective: Collective = COLLECTIVE.of(step)
    grown = collective.bytes * dtype.itemsize // narrow.itemsize
    COLLECTIVE.set(step, replace(collective, dtype=dtype, bytes=grown))
    last = _finished(graph, step, whole, dtype)
    users = list(last.users)
    with graph.inserting_after(last):
        back = _cast(graph, last, narrow)
    for user in users:
        user.replace_input_with(last, back)
    while not source.users:
        before = source.all_input_nodes
        graph.erase_node(source)
        source = before[0]


def _finished(graph: fx.Graph, value: fx.Node, whole: int | None, dtype: torch.dtype) -> fx.Node:
    """What was one operation with the sum (a bias, a mean's division) is in the wider dtype, too."""
    while len(value.users) == 1:
        (user,) = value.users
        if whole is None or user.target not in _FINISHES or PART_OF.get(user) != whole:
            break
        with graph.inserting_before(user):
            for operand in user.all_input_nodes:
                if operand is not value:
                    user.replace_input_with(operand, _cast(graph, operand, dtype))
        VAL.set(user, VAL.of(user).to(dtype))
        value = user
    return value


def _made_wide(graph: fx.Graph, source: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """A sum or product that is for the reduction alone, made again in a wider dtype, if that is free."""
    with graph.inserting_before(source):
        if source.target in _SUMS:
            kwargs = {**source.kwargs, "dtype": dtype}
            return _made(graph, source.target, source.args, kwargs, source, dtype)
        if source.target in _FINISHES and len(source.all_input_nodes) == 1:
            (before,) = source.all_input_nodes
            same = len(before.users) == 1 and PART_OF.get(before) == PART_OF.get(source, -1)
            wide = _made_wide(graph, before, dtype) if same else None
            if wide is None:
                return None
            args = tuple(wide if a is before else a for a in source.args)
            return _made(graph, source.target, args, source.kwargs, source, dtype)
        if source.target not in _PRODUCTS or VAL.of(source).device.type != "cpu":
            return None
        cast = {operand: _cast(graph, operand, dtype) for operand in source.all_input_nodes}
        args = tuple(cast[operand] for operand in source.args)  # type: ignore[index]
        return _made(graph, source.target, args, {}, source, dtype)


def _cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return _made(graph, aten._to_copy.default, (x,), {"dtype": dtype}, x, dtype)


def _made(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    like: fx.Node,
    dtype: torch.dtype,
) -> fx.Node:
    made = graph.call_function(target, args, kwargs)
    inherit(made, like)
    put(made, {VAL: VAL.of(like).to(dtype), LAYOUT: LAYOUT.of(like)})
    return made
