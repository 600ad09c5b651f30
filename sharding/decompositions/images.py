"""Decompositions of convolutions of a split image, in which each block is an image.

The blocks of a split image dim, each with a halo from its neighbours, become part of the batch; the
operation then runs on whole images without padding in that dim. See ``neighbours.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.decompositions.neighbours import (
    Parts,
    each_of,
    is_split,
    register,
    strided,
)
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

_TURNING = 32  # multiplications that cost as much as moving an element


def split_image_dim(parts: Sequence[int], shape: Sequence[int]) -> int | None:
    """The first image dim (after batch and channels) that is split."""
    return next((d for d in range(2, len(shape)) if is_split(shape[d], parts[d])), None)


def fold(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[b, c, ..., count, w, ...] as [b count, c, ..., w, ...]; ``dim`` is that of the blocks."""
    x = x.movedim(dim, 1)
    return x.reshape(-1, *x.shape[2:])


def unfold(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return x.reshape(-1, count, *x.shape[1:]).movedim(1, dim)


def replaced(values: Sequence[int], at: int, value: int) -> list[int]:
    return [value if i == at else v for i, v in enumerate(values)]


def spread(values: Sequence[int], rank: int) -> list[int]:
    """A number for every image dim, given one for each or one for all."""
    return list(values) if len(values) == rank else [values[0]] * rank


# -- convolution ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """A convolution that reads a whole image ``y`` [b, c, ...] and computes ``x``, and its split dim.

    A transposed convolution is the gradient of one: it computes the image that the other reads.
    """

    weight: torch.Tensor
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    dim: int
    count: int

    @property
    def _at(self) -> tuple[int, int, int]:
        """Along the split dim: the step between results, the padding, how many elements each reads."""
        i = self.dim - 2
        return self.stride[i], self.padding[i], self.dilation[i] * (self.weight.shape[self.dim] - 1) + 1

    @property
    def _own(self) -> list[int]:
        """The padding on windows, which include that of the split dim."""
        return replaced(self.padding, self.dim - 2, 0)

    def sizes(self, shape: Sequence[int]) -> list[int]:
        """The image dims of the result for an input shape."""
        how = (shape[2:], self.weight.shape[2:], self.stride, self.padding, self.dilation)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in zip(*how, strict=True)]

    def makes(self, read: Sequence[int], made: Sequence[int]) -> bool:
        """Whether the convolution maps images of one shape to results of another.

        Not so for a transposed convolution whose output padding is a stride or more.
        """
        return self.sizes(read) == list(made[2:])

    def can_write(self, size: int) -> bool:
        """Whether all blocks of the image that is read begin at the same phase of the stride."""
        return is_split(size, self.count) and not each_of(size, self.count) % self._at[0]

    def _seen(self, read: torch.Tensor, made: int) -> torch.Tensor:
        step, padding, reach = self._at
        return fold(strided(read, self.dim, self.count, made, step, -padding, reach), self.dim)

    def forward(self, read: torch.Tensor, bias: torch.Tensor | None, made: int) -> torch.Tensor:
        """The result of the convolution on an image."""
        y = aten.convolution.default(
            self._seen(read, made), self.weight, bias, self.stride, self._own, self.dilation,
            False, [0], self.groups,
        )  # fmt: skip
        return unblocks(unfold(y, self.dim, self.count), self.dim, made)

    def gradient(self, grad: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The gradient of an image of some shape, from that of the result."""
        step, padding, reach = self._at
        if self._pays_to_turn(grad):
            size = shape[self.dim]
            near = strided(grad, self.dim, self.count, size, 1, padding - reach + 1, reach)
            own = self._turned(fold(near, self.dim))
            return unblocks(unfold(own, self.dim, self.count), self.dim, size)
        only = [True, False, False]

        def run(near: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
            dx: torch.Tensor = self._backward(near, like, only)[0]
            return dx

        return gradient_of_reading(run, grad, shape, self.dim, self.count, step, padding, reach)

    def of_weight(self, grad: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight."""
        own = fold(blocks(grad, self.dim, self.count), self.dim)
        seen, only = self._seen(read, grad.shape[self.dim]), [False, True, False]
        dw: torch.Tensor = self._backward(own, seen, only)[1]
        return dw

    def _backward(self, grad: torch.Tensor, read: torch.Tensor, mask: list[bool]) -> Any:
        return aten.convolution_backward.default(
            grad, read, self.weight, None, self.stride, self._own, self.dilation, False, [0],
            self.groups, mask,
        )  # fmt: skip

    def _pays_to_turn(self, grad: torch.Tensor) -> bool:
        """Whether to compute the gradient as a convolution with the flipped kernel.

        That computes no more than the block's own elements, but flips the kernel, which must cost little
        beside what is saved. It is possible without strides only.
        """
        _, _, reach = self._at
        lines = grad.numel() // (grad.shape[1] * grad.shape[self.dim])  # elements of one, over channels
        saved = (reach - 1) * lines  # multiplications by each element of the kernel
        plain = all(s == 1 for s in self.stride) and all(p >= 0 for p in self._around)
        return plain and saved > _TURNING

    @property
    def _around(self) -> list[int]:
        """The padding of the convolution with the flipped kernel."""
        each = zip(self.weight.shape[2:], self.dilation, self.padding, strict=True)
        return [d * (k - 1) - p for k, d, p in each]

    def _turned(self, near: torch.Tensor) -> torch.Tensor:
        """The convolution with the flipped kernel, its channels transposed."""
        made, read, *kernel = self.weight.shape
        weight = self.weight.reshape(self.groups, made // self.groups, read, *kernel)
        weight = weight.transpose(1, 2).reshape(self.groups * read, made // self.groups, *kernel)
        weight = weight.flip(list(range(2, weight.ndim)))
        padding = replaced(self._around, self.dim - 2, 0)
        turned: torch.Tensor = aten.convolution.default(
            near, weight, None, self.stride, padding, self.dilation, False, [0], self.groups
        )
        return turned


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
    if dim is None:
        return NotImplemented
    rank, count = x.ndim - 2, parts[0][dim]
    stride, padding, dilation = (spread(v, rank) for v in (stride, padding, dilation))
    reading = _Reading(weight, stride, padding, dilation, groups, dim, count)
    if not transposed:
        made = reading.sizes(x.shape)[dim - 2]
        return reading.forward(x, bias, made) if is_split(made, count) else NotImplemented
    shape = [x.shape[0], weight.shape[1] * groups]
    sizes = (x.shape[2:], weight.shape[2:], stride, padding, dilation, spread(output_padding, rank))
    for n, k, s, p, d, more in zip(*sizes, strict=True):
        shape.append((n - 1) * s - 2 * p + d * (k - 1) + more + 1)
    if not (reading.can_write(shape[dim]) and reading.makes(shape, x.shape)):
        return NotImplemented
    y = reading.gradient(x, shape)
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


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
    if dim is None:
        return NotImplemented
    count = max(parts[0][dim], parts[1][dim])
    if not (is_split(grad.shape[dim], count) and is_split(x.shape[dim], count)):
        return NotImplemented
    stride, padding, dilation = (spread(v, x.ndim - 2) for v in (stride, padding, dilation))
    reading = _Reading(weight, stride, padding, dilation, groups, dim, count)
    read, made = (grad, x) if transposed else (x, grad)
    writes = not mask[0] or transposed or reading.can_write(x.shape[dim])
    if not (writes and reading.makes(read.shape, made.shape)):
        return NotImplemented

    def of_image() -> torch.Tensor:
        if transposed:
            return reading.forward(grad, None, x.shape[dim])
        return reading.gradient(grad, x.shape)

    def of_bias() -> torch.Tensor:
        return grad.sum([0, *range(2, grad.ndim)])

    def of_weight() -> torch.Tensor:
        return reading.of_weight(made, read)

    gradients = (of_image, of_weight, of_bias)
    return tuple(
        gradient() if wanted else None for gradient, wanted in zip(gradients, mask, strict=True)
    )


def gradient_of_reading(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    grad: torch.Tensor,
    shape: Sequence[int],
    dim: int,
    count: int,
    step: int,
    padding: int,
    reach: int,
) -> torch.Tensor:
    """The gradient of x, of some shape, from that of results: element i reads x from i step - padding on.

    Args:
        run: computes the gradient of images like its second argument, from that of the results.
        count: the number of blocks of the dim; their size must be a multiple of ``step``.
    """
    size = shape[dim]
    each = each_of(size, count)
    first, width = readers(each, step, padding, reach)
    near = fold(reading(grad, dim, count, each // step, first, width), dim)
    wide = (width - 1) * step + reach
    seen = [near.shape[0], *shape[1:dim], wide, *shape[dim + 1 :]]
    like = torch.zeros(seen, dtype=grad.dtype, device=grad.device)
    begin = padding - first * step
    own = _window_of(run(near, like), dim, begin, each)
    return unblocks(unfold(own, dim, count), dim, size)


def readers(each: int, step: int, padding: int, reach: int) -> tuple[int, int]:
    """Which results read a block of ``each`` elements: the first, relative to the block, and how many."""
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
