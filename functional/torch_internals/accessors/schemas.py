"""Operators of torch: classes, schemas, decompositions."""

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

# The schema of an operator: names and types of arguments and results, and which are written. Not public.
# The table of decompositions is effectively public: torch.export's documentation refers to it.
schema: Callable[[OpOverload], Any] = attrgetter("_schema")


def schema_or_none(target: Any) -> Any:
    """The schema of a node's target; None if it is no operator."""
    return getattr(target, "_schema", None)


def is_mutable(target: Any) -> bool:
    """Whether a target is an operator that writes to an argument."""
    op_schema = schema_or_none(target)
    return op_schema is not None and bool(op_schema.is_mutable)


def direct(target: Any) -> Any:
    """An operator without its Python wrapper, which costs a tenth of a microsecond per call."""
    return target._op if isinstance(target, OpOverload) else target


def qualified_name(op: OpOverload | OpOverloadPacket) -> str:
    """The qualified name, ``space::name``; packets have none publicly."""
    return op._qualified_op_name if isinstance(op, OpOverloadPacket) else op.name()


def overload(op: Any, args: Any, kwargs: Any) -> Any:
    """The overload that torch selects for these arguments, without calling it."""
    if not isinstance(op, OpOverloadPacket):
        return op
    names = op.overloads()
    if len(names) > 1:
        names = [torch._C._jit_resolve_packet(op._qualified_op_name, *args, **kwargs)]
    return getattr(op, names[0])
