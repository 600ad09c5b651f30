"""Python numbers as tensor operands, while a function is traced.

torch passes a number that C++ wrapped as a tensor to a tracer as a Python number: the 1 of ``x + 1``,
which is right, but also numbers derived from it, as in ``_to_copy(1)`` or ``expand(1, [5])`` under vmap.
Most operations do not accept a number there, and without a tensor operand the device and shape are
unknown. So such numbers become tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from torchard.functional.torch_internals.accessors.tensors import schema
from torchard.functional.torch_internals.operators import aten

__all__ = ["as_tensors"]


# Operations for which torch promotes a number weakly, as in `x + 1`: the dtype is the tensor's.
_WEAK = {
    *("add", "sub", "mul", "div", "true_divide", "floor_divide"),
    *("add_", "sub_", "mul_", "div_", "true_divide_", "floor_divide_"),
}
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def as_tensors(call: Callable[..., Any], func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands with 0-d tensors for numbers, except those that the operation promotes weakly.

    Args:
        call: runs an operation and records it.
    """
    places = [i for i in _tensor_places(func) if i < len(args) and type(args[i]) in _DTYPES]
    if not places or (_reads_weakly(func) and any(isinstance(a, torch.Tensor) for a in args)):
        return args
    converted = list(args)
    for i in places:
        dtype = _DTYPES[type(args[i])]
        converted[i] = call(aten.full.default, [], args[i], dtype=dtype, device=torch.device("cpu"))
    return tuple(converted)


@cache
def _tensor_places(func: Any) -> tuple[int, ...]:
    arguments = schema(func).arguments
    return tuple(
        i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")
    )


@cache
def _reads_weakly(func: Any) -> bool:
    return func.namespace == "aten" and schema(func).name.removeprefix("aten::") in _WEAK
