"""Decompositions of interpolation of a split image by a whole factor.

Each line becomes ``factor`` lines, each computed from it and the nearest neighbour. So windows have one
more line at both ends (none for nearest interpolation), and repeat the outermost line at the image's
edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.decompositions.images import fold, replaced, split_image_dim, unfold
from torchard.sharding.decompositions.neighbours import (
    Parts,
    clipped,
    each_of,
    in_windows,
    is_split,
    places_in,
    register,
)
from torchard.sharding.rules.blocks import Window, unblocks, windows

Scales = tuple[float | None, float | None]


def _factor(dim: int | None, shape: Sequence[int], size: Sequence[int], scales: Scales) -> int:
    """The factor by which a split dim grows; 0 if it is not whole or differs from the scale."""
    if dim is None or len(shape) != 4:
        return 0
    factor, rest = divmod(size[dim - 2], shape[dim])
    return factor if not rest and scales[dim - 2] in (None, factor) else 0


def _but(scales: Scales, dim: int) -> list[float | None]:
    """The scales without the split dim's, which follows from the sizes."""
    return [None if i == dim - 2 else s for i, s in enumerate(scales)]


def _with_borders(x: torch.Tensor, dim: int, count: int, border: int) -> torch.Tensor:
    """Blocks with ``border`` (0 or 1) more lines at both ends."""
    n, runs = x.shape[dim], []
    each = each_of(n, count)
    for j in range(count):
        start, stop = j * each, min((j + 1) * each, n)
        first, last = max(start - border, 0), min(stop + border, n)
        run = [(first, last - first, 1, first - start + border)]
        if border and start == 0:
            run.insert(0, (0, 1, 1, 0))
        if border and stop == n:
            run.append((n - 1, 1, 1, stop - start + 1))
        runs.append(tuple(run) if start < stop else ())
    return in_windows(x, dim, each + 2 * border, runs)


def _cut_anew(y: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Join blocks that hold ``size`` elements in all, cut anew into the blocks of a dim of that size."""
    count, each = y.shape[dim], each_of(size, y.shape[dim])
    if each != y.shape[dim + 1]:
        runs = []
        for j in range(count):
            own = min(each, size - j * each)
            runs.append(((j * each, own, 1, 0),) if own > 0 else ())
        y = windows(y, Window(dim, each, 0, tuple(runs)))
    return unblocks(y, dim, size)


def _lent(
    grad: torch.Tensor, dim: int, count: int, factor: int, n: int, border: int
) -> torch.Tensor:
    """The cotangents of the results of blocks of n lines with borders."""
    each, runs = each_of(n, count), []
    for j in range(count):
        start, stop = (j * each - border) * factor, (min((j + 1) * each, n) + border) * factor
        runs.append(clipped(start, stop, n * factor) if j * each < n else ())
    return in_windows(grad, dim, (each + 2 * border) * factor, runs)


def _enlarged(
    op: Any,
    border: int,
    parts: Parts,
    x: torch.Tensor,
    size: Sequence[int],
    how: tuple[Any, ...],
    scales: Scales,
) -> Any:
    """``op(x, size, *how, *scales)``, whose elements read ``border`` lines at both sides of their own."""
    dim = split_image_dim(parts[0], x.shape)
    factor = _factor(dim, x.shape, size, scales)
    if dim is None or not factor:
        return NotImplemented
    count = parts[0][dim]
    seen = _with_borders(x, dim, count, border)
    sizes = replaced(size, dim - 2, seen.shape[dim + 1] * factor)
    y = unfold(op(fold(seen, dim), sizes, *how, *_but(scales, dim)), dim, count)
    y = y.narrow(dim + 1, border * factor, each_of(x.shape[dim], count) * factor)
    return _cut_anew(y, dim, size[dim - 2])


def _gathered_back(
    op: Any,
    border: int,
    parts: Parts,
    grad: torch.Tensor,
    size: Sequence[int],
    shape: Sequence[int],
    how: tuple[Any, ...],
    scales: Scales,
) -> Any:
    """``op(grad, size, shape, *how, *scales)``, the gradient of `_enlarged`."""
    dim = split_image_dim(parts[0], grad.shape)
    factor = _factor(dim, shape, size, scales)
    if dim is None or not factor or not is_split(shape[dim], parts[0][dim]):
        return NotImplemented
    n, count = shape[dim], parts[0][dim]
    each = each_of(n, count)
    near = fold(_lent(grad, dim, count, factor, n, border), dim)
    like = [near.shape[0], shape[1], *replaced(shape[2:], dim - 2, each + 2 * border)]
    sizes = replaced(size, dim - 2, near.shape[dim])
    seen = unfold(op(near, sizes, like, *how, *_but(scales, dim)), dim, count)
    own = seen.narrow(dim + 1, border, each)
    if border:  # contributions to lines outside of the image go to the outermost line
        before, behind = seen.narrow(dim + 1, 0, each), seen.narrow(dim + 1, 2, each)
        places = places_in(grad, dim, count, each)
        own = own + torch.where(places == 0, before, 0) + torch.where(places == n - 1, behind, 0)
    return unblocks(own, dim, n)


@register(aten.upsample_nearest2d.default)
def _nearest(
    parts: Parts, x: torch.Tensor, size: list[int], scales_h: Any = None, scales_w: Any = None
) -> Any:
    op = aten.upsample_nearest2d.default
    return _enlarged(op, 0, parts, x, size, (), (scales_h, scales_w))


@register(aten.upsample_bilinear2d.default)
def _bilinear(
    parts: Parts,
    x: torch.Tensor,
    size: list[int],
    align_corners: bool,
    scales_h: Any = None,
    scales_w: Any = None,
) -> Any:
    if align_corners:
        return NotImplemented
    op = aten.upsample_bilinear2d.default
    return _enlarged(op, 1, parts, x, size, (False,), (scales_h, scales_w))


@register(aten.upsample_nearest2d_backward.default)
def _nearest_backward(
    parts: Parts,
    grad: torch.Tensor,
    size: list[int],
    shape: list[int],
    scales_h: Any = None,
    scales_w: Any = None,
) -> Any:
    op = aten.upsample_nearest2d_backward.default
    return _gathered_back(op, 0, parts, grad, size, shape, (), (scales_h, scales_w))


@register(aten.upsample_bilinear2d_backward.default)
def _bilinear_backward(
    parts: Parts,
    grad: torch.Tensor,
    size: list[int],
    shape: list[int],
    align_corners: bool,
    scales_h: Any = None,
    scales_w: Any = None,
) -> Any:
    if align_corners:
        return NotImplemented
    op = aten.upsample_bilinear2d_backward.default
    return _gathered_back(op, 1, parts, grad, size, shape, (False,), (scales_h, scales_w))
