"""Out-variants: which operators can write their results into given memory."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.effects.in_place import overloads, signature

__all__ = ["out_variant"]


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
    wanted = [signature(schema)]
    if schema.overload_name == "Scalar" and schema.name in _WITH_NUMBERS:
        wanted.append([(name, kind.replace("number", "Tensor")) for name, kind in wanted[0]])
    for overload in overloads(op.overloadpacket):
        other = internals.schema(overload)
        names = tuple(argument.name for argument in other.arguments if argument.is_out)
        if names and torch.Tag.generated not in overload.tags and signature(other) in wanted:
            return overload, names
    return None
