"""Out-variants: which operators can write their results into given memory."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchard.functional import torch_internals as internals

__all__ = ["in_place_variant", "is_pointwise", "out_variant"]


# Their out-variants for tensors take numbers too, of which torch makes tensors, here as there.
_WITH_NUMBERS = ("aten::add", "aten::sub", "aten::mul", "aten::div")


# Their out-variants resize the result on the way, or read what was in it before (torch 2.13).
_UNFIT = (
    "aten::binary_cross_entropy",
    "aten::huber_loss",
    "aten::max_unpool2d",
    "aten::max_unpool3d",
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::soft_margin_loss",
)


@functools.cache
def out_variant(op: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload that writes an operator's results, and the names of these; None if there is none.

    Torch generates an out-variant for every operator that lacks one: it calls the operator and copies
    the result. These are tagged, and do not count.
    """
    schema = internals.schema(op)
    if schema.is_mutable or schema.name in _UNFIT or str(op) == "aten.pow.Scalar":
        return None
    wanted = [_signature(schema)]
    if schema.overload_name == "Scalar" and schema.name in _WITH_NUMBERS:
        wanted.append([(name, kind.replace("number", "Tensor")) for name, kind in wanted[0]])
    for overload in _overloads(op):
        other = internals.schema(overload)
        names = tuple(argument.name for argument in other.arguments if argument.is_out)
        if names and torch.Tag.generated not in overload.tags and _signature(other) in wanted:
            return overload, names
    return None


@functools.cache
def in_place_variant(op: Any) -> Any | None:
    """The overload that writes the result into the first operand; None if there is none.

    Of operators without an out-variant, such as `index_put`: the result is a copy that is written to.
    """
    schema = internals.schema(op)
    twin = getattr(_namespace(op), f"{schema.name.partition('::')[2]}_", None)
    if twin is None or schema.is_mutable:
        return None
    overloads = (getattr(twin, name) for name in twin.overloads())
    return next(
        (o for o in overloads if _signature(internals.schema(o)) == _signature(schema)), None
    )


@functools.cache
def is_pointwise(op: Any) -> bool:
    """Whether an operator computes each entry of its result of the same entries of its operands."""
    if not isinstance(op, internals.OpOverload):
        return False
    return any(torch.Tag.pointwise in overload.tags for overload in _overloads(op))


def _namespace(op: Any) -> Any:
    return getattr(torch.ops, op.namespace)


def _overloads(op: Any) -> list[Any]:
    packet = op.overloadpacket
    return [getattr(packet, name) for name in packet.overloads()]


def _signature(schema: Any) -> list[tuple[str, str]]:
    """The names and types of the arguments that are no results."""
    return [(each.name, str(each.type)) for each in schema.arguments if not each.is_out]
