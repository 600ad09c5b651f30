"""Pointwise operations: which they are, and sample calls made from their schemas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from sample_calls import F64, S, Sample, bools, x

from torchard.sharding.rules.compute.pointwise import _is_pointwise

aten = torch.ops.aten


def pointwise_samples(target: Any) -> Iterator[Sample]:
    """Simple calls of a pointwise overload: tensors for tensors, small numbers for numbers."""
    made: dict[str, Any]
    for dtype in (F64, torch.int64, torch.bool):
        args: list[Any] = []
        made = {}
        shapes = itertools.cycle([(5, 4), (4,), (5, 1)])
        for a in target._schema.arguments:
            value = _argument(a, dtype, shapes)
            if a.kwarg_only:
                if value is not None and not a.has_default_value():
                    made[a.name] = value
            elif value is not None:
                args.append(value)
            else:
                args.append(a.default_value)
        yield S(*args, tolerance=1e-13, **made)


def _argument(a: Any, dtype: torch.dtype, shapes: Iterator[tuple[int, ...]]) -> Any:
    kind = str(a.type)
    if kind == "Tensor":
        shape = next(shapes)
        if a.name in ("condition", "mask"):
            return bools(*shape)
        return x(*shape, low=0, high=4, dtype=dtype)
    if a.has_default_value():
        return None
    return {"number": 2, "int": 1, "float": 0.5, "bool": True, "Scalar": 2}.get(kind)


def pointwise_overloads() -> list[Any]:
    """Every pointwise aten overload that changes nothing in place."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        if not name.startswith("aten::"):
            continue
        head, _, overload = name[6:].partition(".")
        op = getattr(getattr(aten, head, None), overload or "default", None)
        if op is not None and _is_pointwise(op) and not op._schema.is_mutable:
            found.append(op)
    return found
