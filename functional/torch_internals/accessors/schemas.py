"""What torch knows of its operators: classes, schemas, decompositions."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._decomp import decomposition_table as DECOMPOSITION_TABLE
from torch._ops import OpOverload, OpOverloadPacket

from torchard.functional.torch_internals.accessors.required import require

__all__ = [
    "DECOMPOSITION_TABLE",
    "OpOverload",
    "OpOverloadPacket",
    "direct",
    "is_mutable",
    "overload",
    "qualified_name",
    "schema",
    "schema_or_none",
]

_ADD = torch.ops.aten.add
require(_ADD.Tensor, "_schema", "_op")
require(_ADD.Tensor._schema, "name", "arguments", "returns", "is_mutable")
require(_ADD, "_qualified_op_name")
require(torch._C, "_jit_resolve_packet")

# An operator's arguments and results: their names, types, and what is written. Nothing public says it.
# The table above is public in all but name: torch.export's documentation refers to it.
schema: Callable[[OpOverload], Any] = attrgetter("_schema")


def schema_or_none(target: Any) -> Any:
    """That of a node's target, which may be any function; None: it is no operator."""
    return getattr(target, "_schema", None)


def is_mutable(target: Any) -> bool:
    """Whether it is an operator that writes to an argument."""
    found = schema_or_none(target)
    return found is not None and bool(found.is_mutable)


def direct(target: Any) -> Any:
    """An op without its Python call wrapper, a tenth of a microsecond each, which has no public name."""
    return target._op if isinstance(target, OpOverload) else target


def qualified_name(op: OpOverload | OpOverloadPacket) -> str:
    """``space::name``; of a packet nothing public says which namespace it is of."""
    return op._qualified_op_name if isinstance(op, OpOverloadPacket) else op.name()


def overload(op: Any, args: Any, kwargs: Any) -> Any:
    """The overload that torch picks for these arguments, which nothing public tells without a call."""
    if not isinstance(op, OpOverloadPacket):
        return op
    names = op.overloads()
    if len(names) > 1:
        names = [torch._C._jit_resolve_packet(op._qualified_op_name, *args, **kwargs)]
    return getattr(op, names[0])
