"""Which operations are writes in place again: the inverse of what `writes.py` makes of a write."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.torch_internals.operators import aten

__all__ = ["SCATTERS", "WRITTEN_VIEWS", "in_place_variant", "is_pointwise", "overloads", "signature"]

# Operator -> the view of its first operand to which it copies its second one.
WRITTEN_VIEWS: dict[Any, Any] = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
}

# Operators that copy their first operand and then write some elements of the copy.
SCATTERS: frozenset[Any] = frozenset(
    {
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten.index_copy.default,
        aten.index_add.default,
        aten.index_fill.int_Scalar,
        aten.index_fill.int_Tensor,
        aten.index_reduce.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter.reduce,
        aten.scatter.value_reduce,
        aten.scatter_add.default,
        aten.scatter_reduce.two,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.masked_scatter.default,
        aten.put.default,
        aten.copy.default,
    }
)


@functools.cache
def in_place_variant(op: Any) -> Any | None:
    """The overload that writes the result into the first operand; None if there is none."""
    if op == aten._unsafe_index_put.default:
        return aten.index_put_.default
    schema = internals.schema_or_none(op)
    if schema is None or schema.is_mutable:
        return None
    twin = getattr(getattr(torch.ops, op.namespace), f"{schema.name.partition('::')[2]}_", None)
    others = overloads(twin) if twin is not None else []
    return next((o for o in others if signature(internals.schema(o)) == signature(schema)), None)


@functools.cache
def is_pointwise(op: Any) -> bool:
    """Whether an operator computes each entry of its result of the same entries of its operands."""
    if not isinstance(op, internals.OpOverload):
        return False
    return any(torch.Tag.pointwise in overload.tags for overload in overloads(op.overloadpacket))


def overloads(packet: Any) -> list[Any]:
    """All overloads of an operator."""
    return [getattr(packet, name) for name in packet.overloads()]


def signature(schema: Any) -> list[tuple[str, str]]:
    """The names and types of the arguments that are no results."""
    return [(each.name, str(each.type)) for each in schema.arguments if not each.is_out]
