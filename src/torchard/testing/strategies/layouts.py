"""The ways in which one value can lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch

from torchard.functional.core.tensor_spec import is_inexact_dtype

__all__ = ["LAYOUTS", "laid_out"]


def laid_out(x: torch.Tensor, layout: str, rng: Random) -> torch.Tensor:
    """A value with other strides or another storage offset.

    Args:
        x: a contiguous tensor.
        layout: one of `LAYOUTS`.
        rng: chooses which dims, steps and offsets.

    Returns:
        A tensor of the same shape. Its values are the same, except for "expanded", where they repeat
        along a dim. What lies in its storage but not in the tensor is NaN, the largest integer, or True.
    """
    return _LAYOUTS[layout](x, rng)


def _contiguous(x: torch.Tensor, rng: Random) -> torch.Tensor:
    return x


def _transposed(x: torch.Tensor, rng: Random) -> torch.Tensor:
    """Contiguous in another order of dims."""
    if x.ndim < 2:
        return x
    first, second = rng.choice([(i, j) for j in range(x.ndim) for i in range(j)])
    return x.transpose(first, second).contiguous().transpose(first, second)


def _offset(x: torch.Tensor, rng: Random) -> torch.Tensor:
    """Contiguous, but not from the start of its storage."""
    start = rng.choice((1, 2, 3))
    return _within(x, (x.numel() + start,), lambda storage: storage[start:].view(x.shape))


def _sliced(x: torch.Tensor, rng: Random) -> torch.Tensor:
    """Every second entry of a dim, from the first or the second on."""
    if not x.ndim:
        return _offset(x, rng)
    d, start = rng.choice(range(x.ndim)), rng.choice((0, 1))
    n = x.shape[d]
    shape = (*x.shape[:d], 2 * n, *x.shape[d + 1 :])
    return _within(x, shape, lambda storage: storage.movedim(d, 0)[start::2].movedim(0, d))


def _expanded(x: torch.Tensor, rng: Random) -> torch.Tensor:
    """One slice of a dim represents all of them, with stride 0."""
    if not x.numel() or not x.ndim:
        return x
    return x.narrow(rng.choice(range(x.ndim)), 0, 1).contiguous().expand(x.shape)


def _within(
    x: torch.Tensor, shape: tuple[int, ...], view: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    inside = view(_garbage(shape, x.dtype))
    inside.copy_(x)
    return inside


def _garbage(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A value that shows when it is read by mistake."""
    if is_inexact_dtype(dtype):
        return torch.full(shape, torch.nan, dtype=dtype)
    return torch.full(shape, True if dtype == torch.bool else torch.iinfo(dtype).max, dtype=dtype)


# Simplest first, as shrinking goes.
_LAYOUTS: dict[str, Callable[[torch.Tensor, Random], torch.Tensor]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "offset": _offset,
    "sliced": _sliced,
    "expanded": _expanded,
}
LAYOUTS = tuple(_LAYOUTS)
