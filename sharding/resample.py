"""How interpolation of a split image comes apart, where it enlarges by a whole factor.

A line then becomes as many lines, of which each is made of it and the nearest neighbour: windows have one
line more at both ends (none for the nearest line itself), at the image's edges the outermost once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchard.sharding.images import fold, replaced, split_image_dim, unfold
from torchard.sharding.neighbours import Parts, each_of, register, worthwhile
from torchard.sharding.rules.blocks import Window, blocks, unblocks, windows

aten = torch.ops.aten


def _factor(dim: int | None, shape: Sequence[int], size: Sequence[int], scales: Sequence[Any]) -> int:
    """By how much a split dim grows; 0 where that is no whole number or not what the scale says."""
    if dim is None or len(shape) != 4:
        return 0
    factor, rest = divmod(size[dim - 2], shape[dim])
    return factor if not rest and scales[dim - 2] in (None, factor) else 0


def _with_borders(x: torch.Tensor, dim: int, count: int, border: int) -> torch.Tensor:
    """Blocks with ``border`` (0 or 1) lines more at both ends."""
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
    return windows(blocks(x, dim, count), Window(dim, each + 2 * border, 0, tuple(runs)))


def _enlarged(
    up: Any, x: torch.Tensor, dim: int, count: int, factor: int, size: Sequence[int], border: int
) -> torch.Tensor:
    seen = _with_borders(x, dim, count, border)
    y = unfold(up(fold(seen, dim), seen.shape[dim + 1] * factor), dim, count)
    y = y.narrow(dim + 1, border * factor, each_of(x.shape[dim], count) * factor)
    return _cut_anew(y, dim, size[dim - 2])


def _cut_anew(y: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Blocks that hold ``size`` elements as blocks of that size."""
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
    """The cotangents of what blocks of n lines with borders are made into."""
    each, size, runs = each_of(n, count), n * factor, []
    for j in range(count):
        start, stop = (j * each - border) * factor, (min((j + 1) * each, n) + border) * factor
        low, high = max(start, 0), min(stop, size)
        runs.append(((low, high - low, 1, low - start),) if j * each < n else ())
    width = (each + 2 * border) * factor
    return windows(blocks(grad, dim, count), Window(dim, width, 0, tuple(runs)))


@register(aten.upsample_nearest2d.default)
def _nearest(
    parts: Parts, x: torch.Tensor, size: list[int], scale_h: Any = None, scale_w: Any = None
) -> Any:
    dim, scales = split_image_dim(parts[0], x.shape), (scale_h, scale_w)
    factor = _factor(dim, x.shape, size, scales)
    if dim is None or not factor:
        return NotImplemented

    def up(image: torch.Tensor, lines: int) -> torch.Tensor:
        sizes, rest = replaced(size, dim - 2, lines), _but(scales, dim)
        made: torch.Tensor = aten.upsample_nearest2d.default(image, sizes, *rest)
        return made

    return _enlarged(up, x, dim, parts[0][dim], factor, size, 0)


@register(aten.upsample_bilinear2d.default)
def _bilinear(
    parts: Parts,
    x: torch.Tensor,
    size: list[int],
    corners: bool,
    scale_h: Any = None,
    scale_w: Any = None,
) -> Any:
    dim, scales = split_image_dim(parts[0], x.shape), (scale_h, scale_w)
    factor = _factor(dim, x.shape, size, scales)
    if dim is None or not factor or corners:
        return NotImplemented

    def up(image: torch.Tensor, lines: int) -> torch.Tensor:
        sizes, rest = replaced(size, dim - 2, lines), _but(scales, dim)
        made: torch.Tensor = aten.upsample_bilinear2d.default(image, sizes, False, *rest)
        return made

    return _enlarged(up, x, dim, parts[0][dim], factor, size, 1)


@register(aten.upsample_nearest2d_backward.default)
def _nearest_backward(
    parts: Parts,
    grad: torch.Tensor,
    size: list[int],
    shape: list[int],
    scale_h: Any = None,
    scale_w: Any = None,
) -> Any:
    dim, scales = split_image_dim(parts[0], grad.shape), (scale_h, scale_w)
    factor = _factor(dim, shape, size, scales)
    if dim is None or not factor or not worthwhile(shape[dim], parts[0][dim]):
        return NotImplemented
    n, count = shape[dim], parts[0][dim]
    near = fold(_lent(grad, dim, count, factor, n, 0), dim)
    lines, rest = near.shape[dim] // factor, _but(scales, dim)
    like = [near.shape[0], shape[1], *replaced(shape[2:], dim - 2, lines)]
    sizes = replaced(size, dim - 2, near.shape[dim])
    own = aten.upsample_nearest2d_backward.default(near, sizes, like, *rest)
    return unblocks(unfold(own, dim, count), dim, n)


@register(aten.upsample_bilinear2d_backward.default)
def _bilinear_backward(
    parts: Parts,
    grad: torch.Tensor,
    size: list[int],
    shape: list[int],
    corners: bool,
    scale_h: Any = None,
    scale_w: Any = None,
) -> Any:
    dim, scales = split_image_dim(parts[0], grad.shape), (scale_h, scale_w)
    factor = _factor(dim, shape, size, scales)
    if dim is None or not factor or corners or not worthwhile(shape[dim], parts[0][dim]):
        return NotImplemented
    n, count = shape[dim], parts[0][dim]
    each = each_of(n, count)
    near = fold(_lent(grad, dim, count, factor, n, 1), dim)
    lines, rest = near.shape[dim] // factor, _but(scales, dim)
    like = [near.shape[0], shape[1], *replaced(shape[2:], dim - 2, lines)]
    sizes = replaced(size, dim - 2, near.shape[dim])
    own = aten.upsample_bilinear2d_backward.default(near, sizes, like, False, *rest)
    own = unfold(own, dim, count)
    # What falls on a line outside of the image falls on the outermost.
    places = torch.arange(count * each, device=grad.device).reshape(count, each)
    places = places.reshape(count, each, *(1 for _ in shape[dim + 1 :]))
    before, here, behind = (own.narrow(dim + 1, k, each) for k in range(3))
    here = here + torch.where(places == 0, before, 0) + torch.where(places == n - 1, behind, 0)
    return unblocks(here, dim, n)


def _but(scales: Sequence[Any], dim: int) -> list[Any]:
    """Scales of the other dims; that of a split one follows from the sizes."""
    return [None if i == dim - 2 else s for i, s in enumerate(scales)]
