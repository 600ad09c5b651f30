"""Tensors as the Python that makes them, and how hypothesis prints tensors of a failing example."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis.vendor.pretty import RepresentationPrinter, for_type_by_name

__all__ = ["number_source", "tensor_source"]

# For larger tensors, hypothesis prints torch's own summary.
_MOST_NUMBERS = 500


def tensor_source(x: torch.Tensor) -> str:
    """An expression that makes a tensor with the same values, dtype and strides.

    Args:
        x: a strided tensor. The bits of a NaN, strides of dims of size one and those of an empty tensor
            count for nothing.

    Returns:
        The text of an expression, in which ``torch`` is the only name.

    >>> import torch
    >>> from torchard.testing.strategies.source import tensor_source
    >>> tensor_source(torch.tensor([[0.1, 0.0], [-torch.inf, 0.0]], dtype=torch.float16).mT)
    'torch.tensor([[0.1, 0.0], [-torch.inf, 0.0]], dtype=torch.float16).mT'
    >>> tensor_source(torch.arange(6)[1::2])
    'torch.tensor([0, 1, 2, 3, 4, 5]).as_strided((3,), (2,), 1)'
    """
    x = x.detach()
    if not x.numel():
        return _values_source(x)
    expanded = [d for d, n in enumerate(x.shape) if n > 1 and x.stride(d) == 0]
    if expanded:
        return f"{tensor_source(_without(x, expanded))}.expand({_tuple(x.shape)})"
    order = list(range(x.ndim))
    if not x.is_contiguous():
        order.sort(key=lambda d: int(-x.stride()[d]))
    ordered = x.permute(order)
    if x.storage_offset() == 0 and ordered.is_contiguous():
        return f"{_values_source(ordered)}{_permutation_back(order)}"
    storage = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    return (
        f"{_values_source(storage)}"
        f".as_strided({_tuple(x.shape)}, {_tuple(x.stride())}, {x.storage_offset()})"
    )


def _without(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The tensor with these dims, along which all is equal, of size one."""
    for d in dims:
        x = x.narrow(d, 0, 1)
    return x


def _permutation_back(order: list[int]) -> str:
    if order == sorted(order):
        return ""
    back = sorted(range(len(order)), key=order.__getitem__)
    return ".mT" if len(order) == 2 else f".permute({_tuple(back)})"


def _tuple(numbers: Any) -> str:
    return str(tuple(numbers))


def _values_source(x: torch.Tensor) -> str:
    """An expression for a contiguous tensor."""
    default = (torch.int64, torch.bool, torch.get_default_dtype())
    dtype = "" if x.dtype in default else f", dtype={x.dtype}"
    if x.numel() == 0:
        return f"torch.zeros({_tuple(x.shape)}{dtype or _named_default(x.dtype)})"
    numbers = [number_source(value, x.dtype) for value in x.flatten().tolist()]
    if len(numbers) > 8 and len(set(numbers)) == 1:
        return f"torch.full({_tuple(x.shape)}, {numbers[0]}{dtype})"
    return f"torch.tensor({_nested(numbers, tuple(x.shape))}{dtype})"


def _named_default(dtype: torch.dtype) -> str:
    """Where no number shows the dtype, any but the default is named."""
    return "" if dtype == torch.get_default_dtype() else f", dtype={dtype}"


def _nested(numbers: list[str], shape: tuple[int, ...]) -> str:
    if not shape:
        return numbers[0]
    step = len(numbers) // shape[0]
    parts = (_nested(numbers[i : i + step], shape[1:]) for i in range(0, len(numbers), step))
    return f"[{', '.join(parts)}]"


def number_source(value: Any, dtype: torch.dtype) -> str:
    """The shortest expression that is this number in its dtype.

    Args:
        value: a number of a tensor of this dtype.
        dtype: its dtype.

    Returns:
        The text of an expression, such as ``"0.1"``, ``"torch.nan"`` or ``"complex(0.0, -1.0)"``.
    """
    if dtype.is_complex:
        parts = (number_source(part, dtype.to_real()) for part in (value.real, value.imag))
        return f"complex({', '.join(parts)})"
    if not dtype.is_floating_point:
        return repr(value)
    if math.isnan(value):
        return "torch.nan"
    if math.isinf(value):
        return "torch.inf" if value > 0 else "-torch.inf"
    if dtype == torch.float64:
        return repr(value)
    shorter = (float(f"{value:.{digits}g}") for digits in range(1, 17))
    return repr(next((s for s in shorter if torch.tensor(s, dtype=dtype).item() == value), value))


def _print_tensor(x: Any, printer: RepresentationPrinter, cycle: bool) -> None:
    small = type(x) is torch.Tensor and x.layout == torch.strided and x.device.type == "cpu"
    if small and x.untyped_storage().nbytes() <= _MOST_NUMBERS * x.itemsize:
        printer.text(tensor_source(x))
    else:
        printer.text(repr(x))


for_type_by_name("torch", "Tensor", _print_tensor)
