"""How sample calls are written: ``S(arguments)``, with small tensors made for the purpose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

F64 = torch.float64


@dataclass
class Sample:
    """One call.

    Attributes:
        values: False where results are not determined (``empty``).
        zero: whether the program creates the first operand, as zeros.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: bool = True
    tolerance: float = 0.0
    zero: bool = False


def S(*args: Any, values: bool = True, tolerance: float = 0.0, **kwargs: Any) -> Sample:
    return Sample(args, kwargs, values, tolerance)


_numbers = torch.Generator().manual_seed(0)


def onto_zeros(*args: Any, **kwargs: Any) -> Sample:
    """A call whose first operand the program creates."""
    table, *rest = args
    return Sample((torch.zeros_like(table), *rest), kwargs, zero=True)


def x(*shape: int, low: int = -4, high: int = 5, dtype: torch.dtype = F64) -> torch.Tensor:
    """Small integers: sums of them are exact in any order."""
    return torch.randint(low, high, shape, generator=_numbers).to(dtype)


def ids(size: int, *shape: int) -> torch.Tensor:
    return x(*shape, low=0, high=size, dtype=torch.int64)


def holes(*shape: int) -> torch.Tensor:
    """With NaN, infinities and ties."""
    y = x(*shape, low=-1, high=2)
    flat = y.view(-1)
    flat[1], flat[-1] = float("nan"), float("-inf")
    return y


def bools(*shape: int) -> torch.Tensor:
    return x(*shape) > 0
