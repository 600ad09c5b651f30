"""Adapters (LoRA, Hu et al., arXiv:2106.09685) and heads on frozen weights; learned representations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, grad_and_value

from torchard import P, nn, optim, random

from .case import DP, LOSS, TWO, Program, expert, gather, reduce, values, weights

WIDTH, RANK, BATCH = 64, 4, 512
ADAPTER = 2 * WIDTH * RANK


def merged(p: Any, w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ (w + p["a"] @ p["b"])).square().mean()


def unmerged(p: Any, w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w + x @ p["a"] @ p["b"]).square().mean()


def adapter() -> Any:
    return weights(a=(WIDTH, RANK), b=(RANK, WIDTH))


def arguments() -> tuple[Any, ...]:
    return adapter(), values(WIDTH, WIDTH, scale=0.1), values(BATCH, WIDTH)


# A rank's terms of the merged weight's gradient, dW, give its terms of dA = dW B' and dB = A' dW,
# which are linear in dW: only these are added up.
@expert("LoRA, merged", [reduce(ADAPTER), LOSS])
def _() -> Program:
    return Program(grad_and_value(merged), arguments(), DP, (P(), P(), P("dp")), P())


@expert("LoRA, unmerged", [reduce(ADAPTER), LOSS])
def _() -> Program:
    return Program(grad_and_value(unmerged), arguments(), DP, (P(), P(), P("dp")), P())


def train(p: Any, state: Any, w: Tensor, x: Tensor) -> Any:
    return optim.adamw(1e-2).update(grad(merged)(p, w, x), state, p)


# The frozen weight (4,096) is gathered, not the batch (32,768); the rest is as above, and the
# update is local.
@expert("LoRA, merged, weight split, AdamW", [gather(WIDTH * WIDTH), reduce(ADAPTER)])
def _() -> Program:
    p, w, x = arguments()
    args = p, optim.adamw(1e-2).init(p), w, x
    return Program(train, args, DP, (P(), P(), P(None, "dp"), P("dp")), P())


def two_layers(p: Any, w: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ (w["up"] + p["a1"] @ p["b1"]))
    return (hidden @ (w["down"] + p["a2"] @ p["b2"])).square().mean()


# Megatron-LM: one all_reduce of the output's rows over tp. Of the adapters, b1 and a2 are split
# over tp, so their gradients are terms over dp alone; a1's and b2's are terms over both axes.
@expert(
    "LoRA, merged, Megatron, 2x2",
    [
        reduce(BATCH // 2 * WIDTH, 2),
        *(reduce(RANK * WIDTH, 2), reduce(WIDTH * RANK, 2)),
        *(reduce(WIDTH * RANK), reduce(RANK * WIDTH), reduce(1, 2)),
    ],
)
def _() -> Program:
    hidden = 2 * WIDTH
    p = weights(a1=(WIDTH, RANK), b1=(RANK, hidden), a2=(hidden, RANK), b2=(RANK, WIDTH))
    w = weights(up=(WIDTH, hidden), down=(hidden, WIDTH))
    adapters = {"a1": P(), "b1": P(None, "tp"), "a2": P("tp"), "b2": P()}
    specs = adapters, {"up": P(None, "tp"), "down": P("tp")}, P("dp")
    args = p, w, values(BATCH, WIDTH)
    return Program(grad_and_value(two_layers), args, TWO, specs, (adapters, P()))


IN = 32
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
