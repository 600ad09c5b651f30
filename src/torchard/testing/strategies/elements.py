"""The numbers that tensors are made of: four kinds of values for every dtype."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args

import torch
from hypothesis import strategies as st

from torchard.functional.core.tensor_spec import is_inexact_dtype

__all__ = ["KINDS", "Kind", "numbers"]

Kind = Literal["integers", "ordinary", "finite", "all"]
KINDS: tuple[str, ...] = get_args(Kind)
# Simplest first, as shrinking goes.
_SMALL = (0, 1, -1, 2, -2, 3, -3, 4, -4)
_ORDINARY = 16.0


@cache
def numbers(kind: str, dtype: torch.dtype) -> st.SearchStrategy[Any]:
    """Numbers that a dtype holds exactly; of a complex dtype, their parts.

    Args:
        kind: one of `KINDS`; each has all numbers of the kind before it.
        dtype: the dtype of the tensor.

    Returns:
        A strategy of Python numbers, which shrinks towards 0.
    """
    if dtype == torch.bool:
        return st.booleans()
    if is_inexact_dtype(dtype):
        return _floats(kind, dtype.to_real() if dtype.is_complex else dtype)
    return _integers(kind, torch.iinfo(dtype))


def _integers(kind: str, info: torch.iinfo) -> st.SearchStrategy[int]:
    small = st.sampled_from([n for n in _SMALL if n >= info.min])
    if kind == "integers":
        return small
    ordinary = small | st.integers(max(-100, info.min), 100)
    return ordinary if kind == "ordinary" else ordinary | st.integers(info.min, info.max)


def _floats(kind: str, dtype: torch.dtype) -> st.SearchStrategy[float]:
    info = torch.finfo(dtype)
    width: Any = {torch.float64: 64, torch.float16: 16}.get(dtype, 32)
    strategy: st.SearchStrategy[float] = st.sampled_from([float(n) for n in _SMALL])
    if kind in ("ordinary", "finite", "all"):
        strategy |= st.floats(-_ORDINARY, _ORDINARY, width=width, allow_subnormal=False)
    if kind in ("finite", "all"):
        strategy |= st.sampled_from(_landmarks(dtype))
        strategy |= st.floats(-info.max, info.max, width=width)
    if kind == "all":
        strategy |= st.sampled_from((torch.nan, torch.inf, -torch.inf))
    return strategy


def _landmarks(dtype: torch.dtype) -> list[float]:
    """Where rounding changes: zeros, around one, the smallest and largest, normal and subnormal."""
    info = torch.finfo(dtype)
    subnormal = info.tiny * info.eps
    positive = (
        1 + info.eps,
        1 - info.eps / 2,
        info.max,
        info.tiny,
        subnormal,
        info.tiny - subnormal,
    )
    return [0.0, -0.0, *(sign * n for n in positive for sign in (1, -1))]
