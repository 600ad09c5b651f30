"""Representations that are learned from frozen, averaged or variational networks."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from torchard import P, nn, random

from .case import DP, LOSS, Program, expert, gather, reduce, values, weights

BATCH, IN, WIDTH = 512, 32, 64
ENCODER = IN * WIDTH + WIDTH * WIDTH


def encoder() -> Any:
    return weights(up=(WIDTH, IN), out=(WIDTH, WIDTH))


def encoded(p: Any, x: Tensor) -> Tensor:
    return nn.linear(nn.gelu(nn.linear(x, p["up"])), p["out"])


def probe_loss(head: Tensor, frozen: Any, x: Tensor, y: Tensor) -> Tensor:
    return (nn.linear(encoded(frozen, x), head) - y).square().mean()


# The frozen weights (6,144) are gathered for the batch's rows (16,384), and only once: they get no
# gradient.
@expert("linear probe, frozen encoder split", [gather(ENCODER), reduce(8 * WIDTH), LOSS])
def _() -> Program:
    head = values(8, WIDTH, scale=0.1)
    args = head, encoder(), values(BATCH, IN), values(BATCH, 8)
    split = P("dp")
    return Program(grad_and_value(probe_loss), args, DP, (P(), split, split, split), P())


def byol(online: Any, target: Any, first: Tensor, second: Tensor) -> Any:
    """A step of BYOL (Grill et al., arXiv:2006.07733): the target is an average of the online network."""

    def loss(p: Any) -> Tensor:
        predicted = F.normalize(nn.linear(encoded(p, first), p["predict"]), dim=-1)
        return (predicted - F.normalize(encoded(target, second), dim=-1)).square().sum(-1).mean()

    grads, value = grad_and_value(loss)(online)
    online = {k: p - 0.1 * grads[k] for k, p in online.items()}
    return online, {k: 0.99 * t + 0.01 * online[k] for k, t in target.items()}, value


# Data parallel: both networks are on all ranks.
@expert("BYOL step", [reduce(ENCODER + WIDTH * WIDTH), LOSS])
def _() -> Program:
    online = {**encoder(), **weights(predict=(WIDTH, WIDTH))}
    args = online, encoder(), values(BATCH, IN), values(BATCH, IN)
    return Program(byol, args, DP, (P(), P(), P("dp"), P("dp")), P())


def vae(p: Any, x: Tensor, key: Tensor) -> Tensor:
    """The negative evidence bound of a variational autoencoder (Kingma, Welling, arXiv:1312.6114)."""
    mean, log_variance = encoded(p, x).chunk(2, -1)
    noise = random.normal(key, mean.shape, mean.dtype)
    decoded = nn.linear(mean + (log_variance / 2).exp() * noise, p["decode"])
    divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(-1) / 2
    return ((decoded - x).square().sum(-1) + divergence).mean()


# Each rank draws the noise of its own rows.
@expert("VAE step", [reduce(ENCODER + IN * WIDTH // 2), LOSS])
def _() -> Program:
    p = {**encoder(), **weights(decode=(IN, WIDTH // 2))}
    args = p, values(BATCH, IN), random.key(0)
    return Program(grad_and_value(vae), args, DP, (P(), P("dp"), P()), P())


def dropped(p: Any, x: Tensor, y: Tensor, key: Tensor) -> Tensor:
    return (nn.dropout(key, encoded(p, x), 0.1) - y).square().mean()


# So is dropout's mask.
@expert("dropout", [reduce(ENCODER), LOSS])
def _() -> Program:
    args = encoder(), values(BATCH, IN), values(BATCH, WIDTH), random.key(0)
    return Program(grad_and_value(dropped), args, DP, (P(), P("dp"), P("dp"), P()), P())
