"""Sequences, patches and graphs, split by channels, positions or nodes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from torchard import P, nn, repeat

from .case import (
    DP,
    LOSS,
    TP,
    TWO,
    Program,
    exchange,
    expert,
    gather,
    halo,
    reduce,
    scatter,
    values,
    weights,
)

BATCH, TIME, CHANNELS = 8, 16, 32
BY_CHANNEL, BY_TIME = P(None, None, "tp"), P(None, None, "dp")


def scan(p: Any, x: Tensor) -> Tensor:
    """A diagonal state space model of x [batch, time, channels], with zeros at first."""

    def step(x: Tensor, h: Tensor, p: Any) -> Any:
        h = torch.sigmoid(p["decay"]) * h + p["in"] * x
        return h, p["out"] * h

    start = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype)
    return repeat(step, x.transpose(0, 1), start, p, collect=True)[1].transpose(0, 1)


def diagonal() -> Any:
    return {name: values(CHANNELS) for name in ("decay", "in", "out")}


# Channels do not depend on each other.
@expert("state space model, channels split, forward")
def _() -> Program:
    args = diagonal(), values(BATCH, TIME, CHANNELS)
    return Program(scan, args, TP, (P("tp"), BY_CHANNEL), BY_CHANNEL)


@expert("state space model, channels split, gradient", [LOSS])
def _() -> Program:
    args = diagonal(), values(BATCH, TIME, CHANNELS)
    step = grad_and_value(lambda p, x: scan(p, x).square().mean())
    return Program(step, args, TP, (P("tp"), BY_CHANNEL), (P("tp"), P()))


def mixer(p: Any, x: Tensor) -> Tensor:
    """A block around the scan: projections, a gate, and a residual."""
    inner = scan(p, nn.linear(x, p["up"])) * nn.silu(nn.linear(x, p["gate"]))
    return x + nn.linear(inner, p["down"])


# As in Megatron-LM: one sum, of the output's terms; in the backward of the loss only weights need
# gradients.
@expert("state space block, channels split, gradient", [reduce(BATCH * TIME * 16)])
def _() -> Program:
    p = {**diagonal(), **weights(up=(CHANNELS, 16), gate=(CHANNELS, 16), down=(16, CHANNELS))}
    specs = {**dict.fromkeys(p, P("tp")), "down": P(None, "tp")}
    step = grad_and_value(lambda p, x: mixer(p, x).square().mean())
    return Program(step, (p, values(BATCH, TIME, 16)), TP, (specs, P()), (specs, P()))


# Over tp the output's terms of a rank's sequences, over dp the gradients of its channels' weights.
@expert(
    "state space block, channels split, gradient, 2x2",
    [reduce(BATCH // 2 * TIME * 16, 2), reduce(CHANNELS * (3 + 3 * 16) / 2, 2), reduce(1, 2)],
)
def _() -> Program:
    p = {**diagonal(), **weights(up=(CHANNELS, 16), gate=(CHANNELS, 16), down=(16, CHANNELS))}
    specs = {**dict.fromkeys(p, P("tp")), "down": P(None, "tp")}
    step = grad_and_value(lambda p, x: mixer(p, x).square().mean())
    return Program(step, (p, values(BATCH, TIME, 16)), TWO, (specs, P("dp")), (specs, P()))


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal linear attention (Katharopoulos et al., arXiv:2006.16236) of [batch, heads, time, d]."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = (k[..., :, None] * v[..., None, :]).cumsum(2)
    norm = (q * k.cumsum(2)).sum(-1, keepdim=True)
    return (q[..., None, :] @ state)[..., 0, :] / norm


@expert("linear attention, heads split")
def _() -> Program:
    heads = P(None, "tp")
    args = tuple(values(2, 4, TIME, 8) for _ in range(3))
    return Program(linear_attention, args, TP, heads, heads)


def causal(w: Tensor, x: Tensor) -> Tensor:
    """A causal convolution of x [batch, channels, time]."""
    return F.conv1d(F.pad(x, (w.shape[-1] - 1, 0)), w)


# Each rank needs the last three positions of the rank before it.
@expert("causal convolution, time split", [halo(3 * BATCH * 16)])
def _() -> Program:
    args = values(16, 16, 4, scale=0.1), values(BATCH, 16, 64)
    return Program(causal, args, DP, (P(), BY_TIME), BY_TIME)


def two_convolutions(p: Any, x: Tensor) -> Tensor:
    hidden = torch.relu(F.conv1d(x, p["first"], padding=1))
    return F.conv1d(hidden, p["second"], padding=1).square().mean()


# A position to each neighbour: of both inputs, and in the backward of the second one's gradient.
@expert(
    "convolutions, time split, gradient",
    [halo(2 * BATCH * 16) * 3, reduce(2 * 16 * 16 * 3), LOSS],
)
def _() -> Program:
    p = {"first": values(16, 16, 3, scale=0.1), "second": values(16, 16, 3, scale=0.1)}
    args = p, values(BATCH, 16, 64)
    return Program(grad_and_value(two_convolutions), args, DP, (P(), BY_TIME), P())


PATCHES, WIDTH = 64, 32


def mixed(p: Any, x: Tensor) -> Tensor:
    """A block of an MLP-Mixer (Tolstikhin et al., arXiv:2105.01601) for x [batch, patches, width]."""
    y = nn.layer_norm(x, p["g1"], p["b1"]).transpose(1, 2)
    x = x + nn.linear(nn.gelu(nn.linear(y, p["t1"])), p["t2"]).transpose(1, 2)
    y = nn.layer_norm(x, p["g2"], p["b2"])
    return x + nn.linear(nn.gelu(nn.linear(y, p["c1"])), p["c2"])


def mixer_weights() -> Any:
    p = weights(
        t1=(2 * PATCHES, PATCHES), t2=(PATCHES, 2 * PATCHES), c1=(64, WIDTH), c2=(WIDTH, 64)
    )
    ones, zeros = torch.ones(WIDTH), torch.zeros(WIDTH)
    return {**p, "g1": ones, "b1": zeros, "g2": ones, "b2": zeros}


# To mix patches, an all_to_all splits the width instead, and another one returns the result.
@expert("MLP-Mixer, patches split, forward", [exchange(BATCH * PATCHES * WIDTH / 4)] * 2)
def _() -> Program:
    args = mixer_weights(), values(BATCH, PATCHES, WIDTH)
    return Program(mixed, args, DP, (P(), P(None, "dp")), P(None, "dp"))


NODES, HIDDEN, CLASSES = 256, 32, 8


def graph(p: Any, adjacency: Tensor, x: Tensor) -> Tensor:
    """Two graph convolutions (Kipf, Welling, arXiv:1609.02907) of x [nodes, features]."""
    hidden = torch.relu(adjacency @ (x @ p["first"]))
    return adjacency @ (hidden @ p["second"])


def nodes() -> tuple[Any, ...]:
    p = {"first": values(HIDDEN, HIDDEN, scale=0.2), "second": values(HIDDEN, CLASSES, scale=0.2)}
    return p, values(NODES, NODES, scale=0.1), values(NODES, HIDDEN)


# The projected features of all nodes are gathered for each rank's rows.
@expert(
    "graph convolutions, nodes split, forward",
    [gather(NODES * HIDDEN), gather(NODES * CLASSES)],
)
def _() -> Program:
    return Program(graph, nodes(), DP, (P(), P("dp"), P("dp")), P("dp"))


# The gradients of what was gathered are sums over the ranks' rows, of which each rank gets its
# nodes'.
@expert(
    "graph convolutions, nodes split, gradient",
    [
        *(gather(NODES * HIDDEN), gather(NODES * CLASSES)),
        *(scatter(NODES * HIDDEN), scatter(NODES * CLASSES)),
        *(reduce(HIDDEN * (HIDDEN + CLASSES)), LOSS),
    ],
)
def _() -> Program:
    step = grad_and_value(lambda p, a, x: graph(p, a, x).square().mean())
    return Program(step, nodes(), DP, (P(), P("dp"), P("dp")), P())
