"""Several tensors, whose dims have names: dims of one name have one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from torchard.functional.core.arguments import checked
from torchard.functional.core.axis_expressions import (
    AxisExpression,
    DimExpression,
    OperandExpression,
    parse,
)
from torchard.functional.core.tensor_spec import is_inexact_dtype
from torchard.testing.strategies.elements import KINDS, numbers
from torchard.testing.strategies.layouts import LAYOUTS, laid_out

__all__ = ["tensors"]

Values = str | st.SearchStrategy[Any]
# The maximum number of dims that an ellipsis represents.
_ELLIPSIS = 2


@checked
def tensors(
    shapes: str,
    *,
    dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
    values: Values | Sequence[Values] = "ordinary",
    layouts: Sequence[str] = LAYOUTS,
    min_size: int = 1,
    max_size: int = 5,
    device: torch.device | str = "cpu",
) -> st.SearchStrategy[tuple[torch.Tensor, ...]]:
    """A hypothesis strategy of several tensors; dims of the same name have the same size.

    Args:
        shapes: the dims of each tensor, as in ``"b s d, d"``. ``(h d)`` is a dim of size h · d, ``3`` and
            ``h=3`` are dims of size 3, and ``...`` is up to two further dims, the same everywhere. A
            tensor may state its dtype: ``"v d, b s:int64"``. A tensor without dims is a scalar.
        dtype: the dtype of all tensors that do not state one, or several dtypes from which one is drawn.
        values: the values of the entries, for all tensors or for each:

            - "integers": from -4 to 4, so that sums and products are exact in every dtype;
            - "ordinary": also others between -16 and 16 (integer dtypes: -100 and 100), and -0.0;
            - "finite": also subnormals, the neighbours of 1, the largest, the smallest;
            - "all": also infinities and NaN;
            - a strategy of numbers, such as ``st.integers(0, 2)`` for ids.

            Many entries of one tensor are equal, so that there are ties.
        layouts: how they may lie in memory: "contiguous", "transposed" (two dims exchanged), "offset"
            (not at the start of the storage), "sliced" (every second entry), "expanded" (stride 0).
            Memory between the entries holds NaN, or the largest integer.
        min_size, max_size: the smallest and largest size of an axis.
        device: where the tensors are; their values are the same as on a CPU.

    Returns:
        A strategy of tuples of tensors, which shrinks towards contiguous tensors of zeros with dims of
        ``min_size``. Hypothesis prints their tensors as Python that can be pasted.

    Raises:
        ValueError: ``shapes`` is malformed (the message points at the place), a kind of values or a
            layout does not exist, or there are more or fewer ``values`` than tensors.

    >>> from hypothesis import find
    >>> from torchard.testing import strategies as ts
    >>> find(ts.tensors("b d, d", values="all"), lambda xs: bool((xs[0] + xs[1]).isnan().any()))
    (tensor([[0.]]), tensor([nan]))
    >>> (x,) = find(ts.tensors("n d"), lambda xs: not xs[0].is_contiguous())
    >>> x.shape, x.stride()
    (torch.Size([2, 1]), (2, 1))
    """
    text = _checked(shapes)
    named = [_named_dtype(text, operand) for operand in text.operands]
    kinds = _per_tensor(values, text)
    unknown = [name for name in layouts if name not in LAYOUTS]
    if unknown or not layouts:
        raise ValueError(f"layouts is {layouts!r}; known layouts are {', '.join(LAYOUTS)}")
    dtypes = st.sampled_from([dtype] if isinstance(dtype, torch.dtype) else list(dtype))
    sizes = st.integers(min_size, max_size)
    drawn = _tensors(text, _axes(text), named, dtypes, kinds, tuple(layouts), sizes)
    return drawn if torch.device(device).type == "cpu" else drawn.map(lambda xs: _on(device, xs))


def _on(device: torch.device | str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Tensors on another device, in memory that is laid out as theirs."""
    moved = []
    for x in tensors:
        storage = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(device)
        moved.append(storage.as_strided(x.shape, x.stride(), x.storage_offset()))
    return tuple(moved)


@st.composite
def _tensors(
    draw: st.DrawFn,
    text: AxisExpression,
    axes: dict[str, int | None],
    named: list[torch.dtype | None],
    dtypes: st.SearchStrategy[torch.dtype],
    kinds: list[Values],
    layouts: tuple[str, ...],
    sizes: st.SearchStrategy[int],
) -> tuple[torch.Tensor, ...]:
    common = draw(dtypes)
    found = {name: draw(sizes) if size is None else size for name, size in axes.items()}
    more = draw(st.lists(sizes, max_size=_ELLIPSIS)) if "..." in text.text else []
    results = []
    for operand, own, kind in zip(text.operands, named, kinds, strict=True):
        shape = [n for dim in operand.dims for n in _sizes(dim, found, more)]
        results.append(draw(_tensor(tuple(shape), own or common, kind, layouts)))
    return tuple(results)


@st.composite
def _tensor(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    kind: Values,
    layouts: tuple[str, ...],
) -> torch.Tensor:
    layout = draw(st.sampled_from(layouts))
    parts = (*shape, 2) if dtype.is_complex else shape
    elements = numbers(kind, dtype) if isinstance(kind, str) else kind
    drawn = torch.from_numpy(draw(hnp.arrays(_wide(dtype), parts, elements=elements)))
    if dtype.is_complex:
        drawn = torch.complex(*drawn.unbind(-1))
    rng: Random = draw(st.randoms(use_true_random=False))
    return laid_out(drawn.to(dtype), layout, rng)


def _wide(dtype: torch.dtype) -> Any:
    """The dtype of numpy that holds what a dtype of torch does, bfloat16 among them."""
    if is_inexact_dtype(dtype):
        return np.float64
    return {torch.bool: np.bool_, torch.uint64: np.uint64}.get(dtype, np.int64)


# -- the expression -----------------------------------------------------------------------------------


def _checked(shapes: str) -> AxisExpression:
    text = parse(shapes)
    if text.results is not None:
        text.fail(
            text.text.index("->"), "there are no results here; name the dims of the tensors alone"
        )
    for clause in text.clauses:
        text.fail(clause.verb, "there are no clauses here; name the dims of the tensors alone")
    return text


def _named_dtype(text: AxisExpression, operand: OperandExpression) -> torch.dtype | None:
    if operand.dtype is None:
        return None
    found = getattr(torch, operand.dtype.text, None)
    if not isinstance(found, torch.dtype):
        text.fail(operand.dtype, f"torch has no dtype {operand.dtype.text!r}")
    return found


def _per_tensor(values: Values | Sequence[Values], text: AxisExpression) -> list[Values]:
    count = len(text.operands)
    kinds = [values] * count if isinstance(values, str | st.SearchStrategy) else list(values)
    if len(kinds) != count:
        raise ValueError(
            f"values has {len(kinds)} entries, but {text.text!r} names {count} tensors"
        )
    for kind in kinds:
        if isinstance(kind, str) and kind not in KINDS:
            choices = ", ".join(KINDS)
            raise ValueError(
                f"values is {kind!r}; it is one of {choices}, or a strategy of numbers"
            )
    return kinds


def _axes(text: AxisExpression) -> dict[str, int | None]:
    """Each name once, and its size if that is given anywhere."""
    found: dict[str, int | None] = {}
    for axis in text.axes():
        known = found.get(axis.name)
        if None not in (known, axis.size) and known != axis.size:
            text.fail(axis, f"{axis.name} is {known} before")
        found[axis.name] = axis.size if known is None else known
    return found


def _sizes(dim: DimExpression, found: dict[str, int], more: list[int]) -> list[int]:
    return more if dim.is_ellipsis else [math.prod(found[axis.name] for axis in dim.axes)]
