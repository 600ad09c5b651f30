"""Decompositions of pools of a split image. See ``images.py``."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.decompositions.images import (
    fold,
    gradient_of_reading,
    readers,
    reading,
    replaced,
    split_image_dim,
    spread,
    unfold,
)
from torchard.sharding.decompositions.neighbours import (
    Parts,
    each_of,
    is_split,
    register,
    starts,
    strided,
)
from torchard.sharding.rules.blocks import unblocks


def _made(n: int, stride: int, padding: int, reach: int, ceil: bool) -> int:
    """The output size of a pool for an input of size n."""
    made = (n + 2 * padding - reach + (stride - 1 if ceil else 0)) // stride + 1
    return made - 1 if ceil and (made - 1) * stride >= n + padding else made


def _lowest(dtype: torch.dtype) -> float | int:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _split(parts: Parts, x: torch.Tensor) -> tuple[int | None, int]:
    """The image dim that is split in some operand, and its number of shards."""
    split = [max(each) for each in zip(*parts, strict=True)]
    dim = split_image_dim(split, x.shape) if x.ndim == 4 else None
    return dim, 1 if dim is None else split[dim]


@register(aten.max_pool2d_with_indices.default)
def _max_pool(
    parts: Parts,
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil: bool = False,
) -> Any:
    dim, count = _split(parts, x)
    if dim is None:
        return NotImplemented
    i = dim - 2
    kernel, padding, dilation = (spread(v, 2) for v in (kernel, padding, dilation))
    stride = spread(stride, 2) if stride else kernel
    reach = dilation[i] * (kernel[i] - 1) + 1
    made = _made(x.shape[dim], stride[i], padding[i], reach, ceil)
    if not is_split(made, count):
        return NotImplemented
    seen = strided(x, dim, count, made, stride[i], -padding[i], reach, _lowest(x.dtype))
    values, places = aten.max_pool2d_with_indices.default(
        fold(seen, dim), kernel, stride, replaced(padding, i, 0), dilation, ceil
    )
    values, places = unfold(values, dim, count), unfold(places, dim, count)
    step = each_of(made, count) * stride[i]
    wide = seen.shape[4] if dim == 2 else seen.shape[dim + 1]
    at = [places // wide, places % wide]
    # In a window of minus infinities the first element that is not padding is the maximum.
    at[i] = (at[i] + starts(places, dim, count, step, -padding[i])).clamp(0, x.shape[dim] - 1)
    places = at[0] * x.shape[3] + at[1]
    return unblocks(values, dim, made), unblocks(places, dim, made)


@register(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(
    parts: Parts,
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil: bool,
    places: torch.Tensor,
) -> Any:
    """The gradient: each block sums the contributions of the results that may have read it."""
    dim, count = _split(parts, x)
    if dim is None:
        return NotImplemented
    i, size = dim - 2, x.shape[dim]
    kernel, padding, dilation = (spread(v, 2) for v in (kernel, padding, dilation))
    stride = spread(stride, 2) if stride else kernel
    each, step = each_of(size, count), stride[i]
    if not is_split(size, count) or each % step:
        return NotImplemented
    reach = dilation[i] * (kernel[i] - 1) + 1
    first, width = readers(each, step, padding[i], reach)
    near = reading(grad, dim, count, each // step, first, width)
    hit = reading(places, dim, count, each // step, first, width, fill=-1)
    at = [torch.div(hit, x.shape[3], rounding_mode="floor"), hit % x.shape[3]]
    at[i] = at[i] - starts(hit, dim, count, each, 0)
    mine = (at[i] >= 0) & (at[i] < each) & (hit >= 0)
    image = replaced(x.shape[2:], i, each)
    flat = fold(torch.where(mine, at[0] * image[1] + at[1], 0), dim)
    given = fold(torch.where(mine, near, 0), dim)
    shape = [flat.shape[0], x.shape[1], math.prod(image)]
    onto = torch.zeros(shape, dtype=x.dtype, device=x.device)
    onto = onto.scatter_add(2, flat.flatten(2), given.flatten(2))
    return unblocks(unfold(onto.reshape(-1, x.shape[1], *image), dim, count), dim, size)


def _averages_evenly(padding: int, ceil: bool, counts_padding: bool) -> bool:
    """Whether every window is divided by the same number, at borders too."""
    return not ceil and (counts_padding or padding == 0)


@register(aten.avg_pool2d.default)
def _avg_pool(
    parts: Parts,
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: Any = (0,),
    ceil: bool = False,
    counts_padding: bool = True,
    divisor: int | None = None,
) -> Any:
    dim, count = _split(parts, x)
    if dim is None:
        return NotImplemented
    i = dim - 2
    kernel, padding = spread(kernel, 2), spread(padding, 2)
    stride = spread(stride, 2) if stride else kernel
    made = _made(x.shape[dim], stride[i], padding[i], kernel[i], ceil)
    if not is_split(made, count) or not _averages_evenly(padding[i], ceil, counts_padding):
        return NotImplemented
    seen = fold(strided(x, dim, count, made, stride[i], -padding[i], kernel[i]), dim)
    y = aten.avg_pool2d.default(
        seen, kernel, stride, replaced(padding, i, 0), ceil, counts_padding, divisor
    )
    return unblocks(unfold(y, dim, count), dim, made)


@register(aten.avg_pool2d_backward.default)
def _avg_pool_backward(
    parts: Parts,
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
    counts_padding: bool,
    divisor: int | None,
) -> Any:
    dim, count = _split(parts, x)
    if dim is None:
        return NotImplemented
    i = dim - 2
    kernel, padding = spread(kernel, 2), spread(padding, 2)
    stride = spread(stride, 2) if stride else kernel
    each = each_of(x.shape[dim], count)
    if (
        not is_split(x.shape[dim], count)
        or each % stride[i]
        or not _averages_evenly(padding[i], ceil, counts_padding)
    ):
        return NotImplemented
    rest = (kernel, stride, replaced(padding, i, 0), ceil, counts_padding, divisor)

    def run(near: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        dx: torch.Tensor = aten.avg_pool2d_backward.default(near, like, *rest)
        return dx

    return gradient_of_reading(run, grad, x.shape, dim, count, stride[i], padding[i], kernel[i])
