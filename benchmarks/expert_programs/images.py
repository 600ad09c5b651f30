"""Convolutional networks, whose batch or images are split."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from torchard import P

from .case import DP, LOSS, Program, expert, halo, reduce, values

BATCH, CHANNELS, SIDE = 8, 16, 16
KERNEL = 9 * CHANNELS * CHANNELS
BY_HEIGHT = P(None, None, "dp")


def kernels(**shapes: tuple[int, ...]) -> Any:
    return {name: values(*shape, scale=0.1) for name, shape in shapes.items()}


def convolve(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=w.shape[-1] // 2)


def residual(p: Any, x: Tensor, norm: Any) -> Tensor:
    """A basic block of a ResNet (He et al., arXiv:1512.03385)."""
    y = torch.relu(norm(convolve(x, p["c1"]), p["g1"], p["b1"]))
    return torch.relu(x + norm(convolve(y, p["c2"]), p["g2"], p["b2"]))


def block() -> Any:
    convolutions = kernels(c1=(CHANNELS, CHANNELS, 3, 3), c2=(CHANNELS, CHANNELS, 3, 3))
    ones, zeros = torch.ones(CHANNELS), torch.zeros(CHANNELS)
    return {**convolutions, "g1": ones, "b1": zeros, "g2": ones, "b2": zeros}


def batch_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, gain, bias, training=True)


def group_norm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 4, gain, bias)


def loss_of(norm: Any) -> Any:
    return grad_and_value(lambda p, x: residual(p, x, norm).square().mean())


def images() -> Tensor:
    return values(BATCH, CHANNELS, SIDE, SIDE)


# Statistics are of the entire batch: a sum and a sum of squares in the forward, and two sums in the
# backward, which are the gradients of the gain and the bias as well.
@expert("ResNet block, batch norm", [reduce(2 * CHANNELS) * 4, reduce(2 * KERNEL), LOSS])
def _() -> Program:
    return Program(loss_of(batch_norm), (block(), images()), DP, (P(), P("dp")), P())


# Groups belong to images, which a rank has entirely.
@expert("ResNet block, group norm", [reduce(2 * KERNEL + 4 * CHANNELS), LOSS])
def _() -> Program:
    return Program(loss_of(group_norm), (block(), images()), DP, (P(), P("dp")), P())


ROW = BATCH * CHANNELS * SIDE


# A convolution needs a row from each neighbour, in the forward, and for its input's gradient; for
# its kernel's gradient, inputs are kept with their neighbours' rows. Statistics are added up over
# the height: two numbers for each of the four groups of an image, in both passes.
@expert(
    "ResNet block, group norm, height split",
    [halo(2 * ROW) * 3, reduce(2 * BATCH * 4) * 4, reduce(2 * KERNEL + 4 * CHANNELS), LOSS],
)
def _() -> Program:
    return Program(loss_of(group_norm), (block(), images()), DP, (P(), BY_HEIGHT), P())


def unet(p: Any, x: Tensor) -> Tensor:
    """A U-Net of two levels for x [batch, channels, height, width]."""
    fine = torch.relu(convolve(x, p["in"]))
    coarse = torch.relu(convolve(F.max_pool2d(fine, 2), p["down"]))
    coarse = torch.relu(convolve(coarse, p["middle"]))
    up = F.interpolate(coarse, scale_factor=2, mode="nearest")
    return convolve(torch.cat([fine, up], 1), p["out"])


def unet_kernels() -> Any:
    c, d = CHANNELS, 2 * CHANNELS
    shapes = {"in": (c, 3), "down": (d, c), "middle": (d, d), "out": (3, c + d)}
    return kernels(**{name: (*shape, 3, 3) for name, shape in shapes.items()})


# Each convolution's input sends a row to both neighbours: 3 channels, 16 and 32 of half the width,
# 16 + 32.
FORWARD = [
    *(halo(2 * BATCH * 3 * SIDE), halo(2 * BATCH * 16 * SIDE // 2)),
    *(halo(2 * BATCH * 32 * SIDE // 2), halo(2 * BATCH * 48 * SIDE)),
]


@expert("U-Net, height split, forward", FORWARD)
def _() -> Program:
    args = unet_kernels(), values(BATCH, 3, SIDE, SIDE)
    return Program(unet, args, DP, (P(), BY_HEIGHT), BY_HEIGHT)


# The backward sends rows of the gradients of `down`, `middle` and `out`, of 32, 32 (half the width)
# and 3 channels, for the gradients of their inputs; inputs are kept with their neighbours' rows.
KERNELS = 9 * (16 * 3 + 32 * 16 + 32 * 32 + 3 * 48)


@expert(
    "U-Net, height split, gradient",
    [
        *FORWARD,
        *(halo(2 * BATCH * 32 * SIDE // 2) * 2, halo(2 * BATCH * 3 * SIDE)),
        *(reduce(KERNELS), LOSS),
    ],
)
def _() -> Program:
    args = unet_kernels(), values(BATCH, 3, SIDE, SIDE)
    loss = grad_and_value(lambda p, x: unet(p, x).square().mean())
    return Program(loss, args, DP, (P(), BY_HEIGHT), P())


# As in data parallelism.
@expert("U-Net, gradient", [reduce(KERNELS), LOSS])
def _() -> Program:
    args = unet_kernels(), values(BATCH, 3, SIDE, SIDE)
    loss = grad_and_value(lambda p, x: unet(p, x).square().mean())
    return Program(loss, args, DP, (P(), P("dp")), P())


def patches(w: Tensor, x: Tensor) -> Tensor:
    """The patch embedding of a ViT: a convolution whose windows do not overlap."""
    return F.conv2d(x, w, stride=4).flatten(2).transpose(1, 2)


# The windows of a rank's rows are its own.
@expert("ViT's patch embedding, height split")
def _() -> Program:
    args = values(64, 3, 4, 4, scale=0.1), values(BATCH, 3, SIDE, SIDE)
    return Program(patches, args, DP, (P(), BY_HEIGHT), P(None, "dp"))
