"""Adapters on frozen weights (LoRA, Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value

from torchard import P, optim

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
