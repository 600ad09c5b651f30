"""Symbolic zero tangents, while a function is traced.

Forward-mode AD makes *ZeroTensor* tangents where there is none: a product with one is zero whatever the
other factor, NaN and infinity included. On fake tensors torch loses the mark, and even the subclass: C++
runs ``view`` of one without calling the tracer, and returns a tensor on meta. So a trace uses plain
zeros, marked in Python, with the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchard.functional.torch_internals.accessors import pytree
from torchard.functional.torch_internals.accessors.tensors import schema
from torchard.functional.torch_internals.operators import aten

__all__ = ["is_zero", "run"]


RunOperation = Callable[..., Any]


def is_zero(value: Any) -> bool:
    """Whether a value is a symbolic zero."""
    return getattr(value, "_torchard_zero", False) is True


def run(call: RunOperation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation of a trace, by torch's rule for symbolic zeros where an operand is one.

    Args:
        call: runs an operation and records it.
    """
    if func is aten._efficientzerotensor.default:
        return _marked(call(aten.zeros.default, *args, **kwargs))
    if not any(map(is_zero, args)):
        return call(func, *args, **kwargs)
    special = _RULES.get(func)
    if special is not None:
        return special(call, func, args, kwargs)
    out = call(func, *args, **kwargs)
    if _is_view(func):
        pytree.tree_map_only(torch.Tensor, _marked, out)
    return out


def _marked(value: torch.Tensor) -> torch.Tensor:
    value._torchard_zero = True  # type: ignore[attr-defined]  # our own mark
    return value


def _is_view(func: Any) -> bool:
    says = schema(func)
    returns = says.returns
    return bool(returns) and not says.is_mutable and returns[0].alias_info is not None


def _zeros_like(call: RunOperation, out: torch.Tensor) -> torch.Tensor:
    return _marked(call(aten.zeros.default, list(out.shape), dtype=out.dtype, device=out.device))


def _product(call: RunOperation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _zeros_like(call, call(func, *args, **kwargs))


def _quotient(call: RunOperation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = call(func, *args, **kwargs)
    return out if is_zero(args[1]) else _zeros_like(call, out)


def _sum(call: RunOperation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The non-zero operand, in the shape and dtype of the sum."""
    out = call(func, *args, **kwargs)
    first, second = args
    if is_zero(first) and is_zero(second):
        return _zeros_like(call, out)
    if not isinstance(second, torch.Tensor):
        return out
    sign = -1 if func is aten.sub.Tensor else 1
    factor = sign * kwargs.get("alpha", 1) if is_zero(first) else 1
    kept = second if is_zero(first) else first
    if kept.shape != out.shape:
        kept = call(aten.expand.default, kept, list(out.shape))
    kept = call(aten._to_copy.default, kept, dtype=out.dtype)
    return kept if factor == 1 else call(aten.mul.Tensor, kept, factor)


_RULES: dict[Any, Callable[[RunOperation, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.mul.Tensor: _product,
    aten.linalg_cross.default: _product,
    aten.div.Tensor: _quotient,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
}
