"""Generators and diffusion, whose noise has the shape of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from torchard import P, nn, random

from .case import DP, LOSS, Program, expert, reduce, values, weights

BATCH, NOISE, WIDTH = 256, 16, 64
GENERATOR = WIDTH * NOISE + WIDTH * WIDTH
DISCRIMINATOR = WIDTH * WIDTH + WIDTH


def generate(p: Any, noise: Tensor) -> Tensor:
    return torch.tanh(nn.linear(nn.relu(nn.linear(noise, p["g1"])), p["g2"]))


def judge(p: Any, x: Tensor) -> Tensor:
    return nn.linear(nn.relu(nn.linear(x, p["d1"])), p["d2"])


def gan(generator: Any, discriminator: Any, x: Tensor, key: Tensor) -> Any:
    """The losses and gradients of both networks; x [batch, width] are real."""

    def generator_loss(p: Any, noise: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-judge(discriminator, generate(p, noise))).mean()

    def discriminator_loss(p: Any, noise: Tensor) -> Tensor:
        fake = generate(generator, noise)
        real, made = judge(p, x), judge(p, fake)
        return (torch.nn.functional.softplus(-real) + torch.nn.functional.softplus(made)).mean()

    first, second = random.split(key).unbind()
    noise = random.normal(first, (x.shape[0], NOISE), x.dtype)
    other = random.normal(second, (len(x), NOISE), x.dtype)
    return grad_and_value(generator_loss)(generator, noise), grad_and_value(discriminator_loss)(
        discriminator, other
    )


def networks() -> tuple[Any, Any]:
    return (
        weights(g1=(WIDTH, NOISE), g2=(WIDTH, WIDTH)),
        weights(d1=(WIDTH, WIDTH), d2=(1, WIDTH)),
    )


# Each rank draws the noise of its own rows, and gradients are added up as in data parallelism.
@expert("GAN step", [reduce(GENERATOR), reduce(DISCRIMINATOR), LOSS, LOSS])
def _() -> Program:
    args = *networks(), values(BATCH, WIDTH), random.key(0)
    return Program(gan, args, DP, (P(), P(), P("dp"), P()), P())


def critic(generator: Any, discriminator: Any, x: Tensor, key: Tensor) -> Any:
    """The generator's gradient: of the batch, only the shape is used."""
    noise = random.normal(key, (x.shape[0], NOISE), x.dtype)
    return grad_and_value(lambda p: -judge(discriminator, generate(p, noise)).mean())(generator)


# The batch's split is known although none of its values are: each rank draws its own rows.
@expert("generator step, shape of the batch", [reduce(GENERATOR), LOSS])
def _() -> Program:
    args = *networks(), values(BATCH, WIDTH), random.key(0)
    return Program(critic, args, DP, (P(), P(), P("dp"), P()), P())


def sample(p: Any, x: Tensor, key: Tensor) -> Tensor:
    """Samples as many as x has rows."""
    return generate(p, random.normal(key, (x.shape[0], NOISE), x.dtype))


@expert("generated samples, split")
def _() -> Program:
    args = networks()[0], values(BATCH, WIDTH), random.key(0)
    return Program(sample, args, DP, (P(), P("dp"), P()), P("dp"))


def diffusion(p: Any, x: Tensor, key: Tensor) -> Any:
    """The loss of predicting the noise (DDPM, Ho et al., arXiv:2006.11239) and its gradient."""

    def loss(p: Any) -> Tensor:
        times, noises = random.split(key).unbind()
        t = random.randint(times, (x.shape[0],), 0, 100)
        signal = torch.cos(t[:, None] / 100 * torch.pi / 2).to(x.dtype)
        noise = random.normal(noises, x.shape, x.dtype)
        noisy = signal * x + torch.sqrt(1 - signal**2) * noise
        hidden = nn.silu(nn.linear(noisy, p["up"]) + nn.embedding(p["time"], t))
        return (nn.linear(hidden, p["down"]) - noise).square().mean()

    return grad_and_value(loss)(p)


@expert("diffusion step", [reduce(2 * WIDTH * 128 + 100 * 128), LOSS])
def _() -> Program:
    p = weights(up=(128, WIDTH), down=(WIDTH, 128), time=(100, 128))
    return Program(diffusion, (p, values(BATCH, WIDTH), random.key(0)), DP, (P(), P("dp"), P()), P())
