"""Training steps of replicated and split parameters, and Muon."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from torchard import P, clip_by_global_norm, nn, optim

from .case import DP, LOSS, TWO, Program, exchange, expert, gather, reduce, scatter, values, weights

IN, HIDDEN, BATCH = 32, 64, 256
SIZE = IN * HIDDEN + HIDDEN + HIDDEN * IN + IN


def mlp(p: Any, x: Tensor) -> Tensor:
    return nn.linear(nn.gelu(nn.linear(x, p["w1"], p["b1"])), p["w2"], p["b2"]).square().mean()


def params() -> Any:
    return weights(w1=(HIDDEN, IN), b1=(HIDDEN,), w2=(IN, HIDDEN), b2=(IN,))


def training(optimizer: optim.Optimizer, limit: float | None = None) -> Any:
    """A training step, with gradients clipped to a global norm if there is a limit."""

    def step(p: Any, state: Any, x: Tensor) -> Any:
        grads, loss = grad_and_value(mlp)(p, x)
        if limit is not None:
            grads, _ = clip_by_global_norm(grads, limit)
        return *optimizer.update(grads, state, p), loss

    return step


def trained(optimizer: optim.Optimizer, limit: float | None = None) -> Program:
    p = params()
    args = p, optimizer.init(p), values(BATCH, IN)
    return Program(training(optimizer, limit), args, DP, (P(), P(), P("dp")), P())


# Data parallelism: gradients are added up, and every rank updates its copy.
@expert("SGD with momentum", [reduce(SIZE), LOSS])
def _() -> Program:
    return trained(optim.sgd(0.1, momentum=0.9))


@expert("AdamW", [reduce(SIZE), LOSS])
def _() -> Program:
    return trained(optim.adamw(1e-2))


# Every rank has all gradients, so that their norm needs no further sum.
@expert("AdamW, clipped", [reduce(SIZE), LOSS])
def _() -> Program:
    return trained(optim.adamw(1e-2), 0.1)


def by_hand(p: Any, velocity: Any, x: Tensor) -> Any:
    """SGD with momentum as in many scripts: a dict comprehension for each tree."""
    grads = torch.func.grad(mlp)(p, x)
    velocity = {k: 0.9 * velocity[k] + grads[k] for k in p}
    return {k: p[k] - 0.1 * velocity[k] for k in p}, velocity


@expert("SGD with momentum, by hand", [reduce(SIZE)])
def _() -> Program:
    p = params()
    args = p, {k: torch.zeros_like(v) for k, v in p.items()}, values(BATCH, IN)
    return Program(by_hand, args, DP, (P(), P(), P("dp")), P())


def zero1(limit: float | None = None) -> Program:
    optimizer, p = optim.adamw(1e-2), params()
    args = p, optimizer.init(p), values(BATCH, IN)
    state = optim.AdamState(P(), P("dp"), P("dp"))
    return Program(training(optimizer, limit), args, DP, (P(), state, P("dp")), (P(), state, P()))


# Each rank gets the sum of its shard of the gradients, updates this shard, and gathers new
# parameters.
@expert("ZeRO-1, AdamW", [scatter(SIZE), gather(SIZE), LOSS])
def _() -> Program:
    return zero1()


# The norm's square is added up over shards.
@expert("ZeRO-1, AdamW, clipped", [scatter(SIZE), gather(SIZE), LOSS, reduce(1)])
def _() -> Program:
    return zero1(0.1)


MEGATRON = {"w1": P("tp"), "b1": P("tp"), "w2": P(None, "tp"), "b2": P()}
SHARE = IN * HIDDEN // 2 + HIDDEN // 2 + HIDDEN // 2 * IN + IN


# The output's rows are added up over tp, the gradients of each rank's shards over dp.
@expert("AdamW, Megatron, 2x2", [reduce(BATCH // 2 * IN, 2), reduce(SHARE, 2), reduce(1, 2)])
def _() -> Program:
    optimizer, p = optim.adamw(1e-2), params()
    state = optim.AdamState(P(), MEGATRON, MEGATRON)
    args = p, optimizer.init(p), values(BATCH, IN)
    specs = (MEGATRON, state, P("dp"))
    return Program(training(optimizer), args, TWO, specs, (MEGATRON, state, P()))


# The same with moments split over dp as well: in place of the all_reduce, a psum_scatter and an
# all_gather.
@expert(
    "ZeRO-1, AdamW, Megatron, 2x2",
    [reduce(BATCH // 2 * IN, 2), scatter(SHARE, 2), gather(SHARE, 2), reduce(1, 2)],
)
def _() -> Program:
    optimizer, p = optim.adamw(1e-2), params()
    moments = {"w1": P("tp", "dp"), "b1": P(("tp", "dp")), "w2": P("dp", "tp"), "b2": P("dp")}
    state = optim.AdamState(P(), moments, moments)
    args = p, optimizer.init(p), values(BATCH, IN)
    specs = (MEGATRON, state, P("dp"))
    return Program(training(optimizer), args, TWO, specs, (MEGATRON, state, P()))


def layer(b: Tensor, x: Tensor) -> Any:
    """The new bias of an activation, and the loss."""
    gradient, loss = grad_and_value(lambda b: torch.tanh(x + b).square().mean())(b)
    return b - 0.1 * gradient, loss


# The bias is gathered and its gradient's terms are scattered; the batch stays where it is.
@expert("bias split like the batch", [gather(64), scatter(64), LOSS])
def _() -> Program:
    return Program(layer, (values(64), values(512, 64)), DP, (P("dp"), P("dp")), (P("dp"), P()))


def dense(w: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Any:
    def loss(w: Tensor, b: Tensor) -> Tensor:
        return (torch.tanh(x @ w + b) - y).square().mean()

    (dw, db), value = grad_and_value(loss, (0, 1))(w, b)
    return w - 0.1 * dw, b - 0.1 * db, value


# The same of a layer with plain arguments: the weight (4,096) is less than the batch (32,768).
@expert("dense layer split like the batch", [gather(64 * 65), scatter(64 * 65), LOSS])
def _() -> Program:
    args = values(64, 64, scale=0.1), values(64), values(512, 64), values(512, 64)
    split = P("dp")
    return Program(dense, args, DP, (split, split, split, split), (split, split, P()))


def newton_schulz(m: Tensor) -> Tensor:
    """The orthogonal factor of m [rows, columns], or of each of several (Muon, Jordan et al., 2024)."""
    m = m / (m.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = m @ m.mT
        m = 3.4445 * m + (-4.7750 * gram + 2.0315 * gram @ gram) @ m
    return m


# Products of a rank's rows would gather m in each iteration, and those of its columns add up as
# much. To send 0.75 * 32 * 32 numbers takes as long as 200,000 FLOPs (at 64 for a byte), and to
# compute what the others do as well 700,000: so m is gathered once, each rank iterates, and keeps
# its rows.
@expert("Muon, rows split", [gather(32 * 32)], repeats=4)
def _() -> Program:
    return Program(newton_schulz, (values(32, 32),), DP, P("dp"), P("dp"))


# A matrix with many more columns than rows: its Gram matrix (1,024) is added up in each iteration,
# which is less than the matrix (32,768); products with it are local.
@expert("Muon, columns split", [reduce(1), reduce(32 * 32) * 5])
def _() -> Program:
    by_column = P(None, "dp")
    return Program(newton_schulz, (values(32, 1024),), DP, by_column, by_column)


# Four layers' matrices: an all_to_all gives each rank one of them, and another one returns it.
@expert("Muon, four layers, rows split", [exchange(32 * 128), exchange(32 * 128)])
def _() -> Program:
    by_row = P(None, "dp")
    return Program(newton_schulz, (values(4, 32, 128),), DP, by_row, by_row)


def muon(w: Tensor, momentum: Tensor, x: Tensor) -> Any:
    gradient = torch.func.grad(lambda w: torch.tanh(x @ w).square().mean())(w)
    momentum = 0.95 * momentum + gradient
    return w - 0.02 * newton_schulz(momentum), momentum


# Fully sharded: the weight is gathered for its batch's rows, the gradient scattered, and the new
# momentum gathered once, from which every rank computes the update; it keeps its rows.
@expert(
    "Muon step, fully sharded",
    [gather(32 * 32), scatter(32 * 32), gather(32 * 32)],
    repeats=1.6,
)
def _() -> Program:
    args = values(32, 32, scale=0.2), torch.zeros(32, 32), values(1024, 32)
    return Program(muon, args, DP, (P("dp"), P("dp"), P("dp")), (P("dp"), P("dp")))
