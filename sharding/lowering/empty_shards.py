"""The results of a rank that has nothing to compute, since its shards are empty.

Its result is empty too, or the identity of a reduction over the empty dim. No operation runs, since some
kernels crash on empty tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.tags import LAYOUT, VAL
from torchard.sharding.layouts.layout import Coords, Layout
from torchard.sharding.rules import Call, rule_of

__all__ = ["empty_shard_result"]

Full = Callable[[Sequence[int], float | int | bool, torch.Tensor], fx.Node]


def empty_shard_result(
    call: Call, outs: Sequence[Layout], at: Coords, sizes: Mapping[str, int], full: Full
) -> Any:
    """The result of an operation at a coordinate without elements; None if there is something to compute.

    Args:
        call: the operation.
        outs: the layouts of its results.
        at: the coordinate.
        sizes: the sizes of the mesh's axes.
        full: emits a tensor of a shape, filled with a value, of another tensor's dtype and device.
    """
    layouts = [*outs, *(LAYOUT.of(o) for o in call.operands)]
    if not any(layout.split_axes for layout in layouts):
        return None
    shapes = [out.local_shape(at, sizes) for out in outs]
    vals = _results(call.node)
    if all(0 in shape for shape in shapes):
        return _spread(call.node, [full(s, 0, v) for s, v in zip(shapes, vals, strict=True)])
    op = _empty_reduction(call, at, sizes)
    if op is None:
        return None
    identities = [full(s, _identity(op, v.dtype), v) for s, v in zip(shapes, vals, strict=True)]
    return _spread(call.node, identities)


def _empty_reduction(call: Call, at: Coords, sizes: Mapping[str, int]) -> str | None:
    """The reduction over a factor of which this coordinate has no element; None if there is none."""
    rule = rule_of(call)
    for operand, dims in zip(call.operands, rule.ins, strict=True):
        layout: Layout = LAYOUT.of(operand)
        if not layout.split_axes:
            continue
        local = layout.local_shape(at, sizes)
        for size, n, factors in zip(VAL.of(operand).shape, local, dims, strict=True):
            if n == 0 and size and factors:
                return next((rule.combiner[f] for f in factors if f in rule.combiner), None)
    return None


def _results(node: fx.Node) -> list[torch.Tensor]:
    val = VAL.of(node)
    values = val if isinstance(val, (tuple, list)) else (val,)
    return [v for v in values if isinstance(v, torch.Tensor)]


def _spread(node: fx.Node, values: list[Any]) -> Any:
    """A single value, or a tuple of values with None where the operation returns None."""
    if not isinstance(VAL.of(node), (tuple, list)):
        return values[0]
    rest = iter(values)
    return tuple(next(rest) if isinstance(v, torch.Tensor) else None for v in VAL.of(node))


def _identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The identity of a reduction."""
    if op == "sum":
        return 0
    if op not in ("max", "min"):
        raise NotImplementedError(f"no identity is known for the reduction {op}")
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    info = torch.iinfo(dtype)
    return info.min if op == "max" else info.max
