"""How convolutions of a split image come apart: each block is an image of its own.

The blocks of a split image dim, each with the border its neighbours lend it, become part of the batch;
the operation then runs on a whole image without padding in that dim. See ``neighbours.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchard.functional.operators import aten
from torchard.sharding.neighbours import Parts, each_of, register, strided, worthwhile
from torchard.sharding.rules.blocks import blocks, unblocks

__all__ = [
    "fold",
    "gradient_of_reading",
    "readers",
    "reading",
    "replaced",
    "split_image_dim",
    "spread",
    "unfold",
]


def split_image_dim(parts: Sequence[int], shape: Sequence[int]) -> int | None:
    """The first image dim (behind batch and channels) that is split into more than single lines."""
    return next((d for d in range(2, len(shape)) if worthwhile(shape[d], parts[d])), None)


def fold(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[b, c, ..., count, w, ...] as [b count, c, ..., w, ...]; ``dim`` is that of the blocks."""
    x = x.movedim(dim, 1)
    return x.reshape(-1, *x.shape[2:])


def unfold(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return x.reshape(-1, count, *x.shape[1:]).movedim(1, dim)


def replaced(values: Sequence[int], at: int, value: int) -> list[int]:
    return [value if i == at else v for i, v in enumerate(values)]


def spread(values: Sequence[int], rank: int) -> list[int]:
    """One number for every image dim, where one may stand for all."""
    return list(values) if len(values) == rank else [values[0]] * rank


# -- convolution ----------------------------------------------------------------------------------


@register(aten.convolution.default)
def _convolution(
    parts: Parts,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    dim = split_image_dim(parts[0], x.shape)
    if dim is None or transposed:
        return NotImplemented
    i, count = dim - 2, parts[0][dim]
    stride, padding, dilation = (spread(v, x.ndim - 2) for v in (stride, padding, dilation))
    reach = dilation[i] * (weight.shape[dim] - 1) + 1
    made = (x.shape[dim] + 2 * padding[i] - reach) // stride[i] + 1
    if not worthwhile(made, count):
        return NotImplemented
    seen = fold(strided(x, dim, count, made, stride[i], -padding[i], reach), dim)
    own = replaced(padding, i, 0)
    y = aten.convolution.default(
        seen, weight, bias, stride, own, dilation, False, output_padding, groups
    )
    return unblocks(unfold(y, dim, count), dim, made)


@register(aten.convolution_backward.default)
def _convolution_backward(
    parts: Parts,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    mask: list[bool],
) -> Any:
    dim = split_image_dim(parts[1], x.shape)
    dim = split_image_dim(parts[0], grad.shape) if dim is None else dim
    if dim is None or transposed:
        return NotImplemented
    i, count = dim - 2, max(parts[0][dim], parts[1][dim])
    made, size = grad.shape[dim], x.shape[dim]
    stride, padding, dilation = (spread(v, x.ndim - 2) for v in (stride, padding, dilation))
    reach = dilation[i] * (weight.shape[dim] - 1) + 1
    if not (worthwhile(made, count) and worthwhile(size, count)):
        return NotImplemented
    if mask[0] and each_of(size, count) % stride[i]:
        return NotImplemented  # blocks would begin at different phases of the stride
    rest = (stride, replaced(padding, i, 0), dilation, False, output_padding, groups)
    grads: list[torch.Tensor | None] = [None, None, None]
    if mask[0]:

        def run(near: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            only = [True, False, False]
            made: torch.Tensor = aten.convolution_backward.default(
                near, like, weight, None, *rest, only
            )[0]
            return made

        grads[0] = gradient_of_reading(run, grad, x, dim, count, stride[i], padding[i], reach)
    if mask[1]:
        seen = fold(strided(x, dim, count, made, stride[i], -padding[i], reach), dim)
        own = fold(blocks(grad, dim, count), dim)
        only = [False, True, False]
        grads[1] = aten.convolution_backward.default(own, seen, weight, None, *rest, only)[1]
    if mask[2]:
        grads[2] = grad.sum([d for d in range(grad.ndim) if d != 1])
    return tuple(grads)


def gradient_of_reading(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    grad: torch.Tensor,
    x: torch.Tensor,
    dim: int,
    count: int,
    step: int,
    padding: int,
    reach: int,
) -> torch.Tensor:
    """The gradient of x from results of which element i read x from i step - padding on.

    Args:
        run: gives the gradient of images like its second argument, from that of what reads them.
        count: blocks of the dim, whose size must be a multiple of ``step``.
    """
    size = x.shape[dim]
    each = each_of(size, count)
    first, width = readers(each, step, padding, reach)
    near = fold(reading(grad, dim, count, each // step, first, width), dim)
    wide = (width - 1) * step + reach
    shape = [near.shape[0], *x.shape[1:dim], wide, *x.shape[dim + 1 :]]
    like = torch.zeros(shape, dtype=x.dtype, device=x.device)
    begin = padding - first * step
    own = _window_of(run(near, like), dim, begin, each)
    return unblocks(unfold(own, dim, count), dim, size)


def readers(each: int, step: int, padding: int, reach: int) -> tuple[int, int]:
    """Which results read a block of ``each`` elements: the first, from its own place, and how many."""
    first, last = -((reach - 1 - padding) // step), (each - 1 + padding) // step
    return first, last - first + 1


def reading(
    y: torch.Tensor, dim: int, count: int, each: int, first: int, width: int, fill: int = 0
) -> torch.Tensor:
    """Windows of ``width`` results, block j's from j each + first on."""
    return strided(y, dim, count, count * each, 1, first, width - each + 1, fill)


def _window_of(x: torch.Tensor, dim: int, begin: int, size: int) -> torch.Tensor:
    """Elements of a dim, zeros where there are none."""
    front, back = max(-begin, 0), max(begin + size - x.shape[dim], 0)
    if front or back:
        x = aten.constant_pad_nd.default(x, [0, 0] * (x.ndim - 1 - dim) + [front, back], 0)
    return x.narrow(dim, begin + front, size)
