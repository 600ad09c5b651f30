"""Ensembles, tasks, trajectories and examples under vmap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from torchard import P, nn, random

from .case import DP, LOSS, TWO, Program, expert, reduce, values, weights

MEMBERS, BATCH, IN, HIDDEN, OUT = 8, 64, 16, 32, 4
SIZE = HIDDEN * IN + OUT * HIDDEN


def mlp(p: Any, x: Tensor) -> Tensor:
    return nn.linear(torch.tanh(nn.linear(x, p["up"])), p["down"])


def network(*leading: int) -> Any:
    return {
        "up": values(*leading, HIDDEN, IN, scale=0.25),
        "down": values(*leading, OUT, HIDDEN, scale=0.2),
    }


def error(p: Any, x: Tensor, y: Tensor) -> Tensor:
    return (mlp(p, x) - y).square().mean()


def data(*leading: int) -> tuple[Tensor, Tensor]:
    return values(*leading, IN), values(*leading, OUT)


def ensemble(p: Any, x: Tensor, y: Tensor) -> Any:
    """A gradient step of each member on the same batch, and the mean of the losses."""
    grads, losses = vmap(grad_and_value(error), (0, None, None))(p, x, y)
    return {k: p[k] - 0.1 * grads[k] for k in p}, losses.mean()


# Members are independent of each other.
@expert("ensemble, members split", [LOSS])
def _() -> Program:
    args = network(MEMBERS), *data(BATCH)
    return Program(ensemble, args, DP, (P("dp"), P(), P()), (P("dp"), P()))


# Over dp, which splits the batch, the gradients of a rank's members are added up; the losses over
# both axes.
@expert("ensemble, members and batch split, 2x2", [reduce(MEMBERS // 2 * SIZE, 2), LOSS])
def _() -> Program:
    args = network(MEMBERS), *data(BATCH)
    return Program(ensemble, args, TWO, (P("tp"), P("dp"), P("dp")), (P("tp"), P()))


def average(p: Any, x: Tensor) -> Tensor:
    return vmap(mlp, (0, None))(p, x).mean(0)


@expert("ensemble's mean, members split", [reduce(BATCH * OUT)])
def _() -> Program:
    return Program(average, (network(MEMBERS), data(BATCH)[0]), DP, (P("dp"), P()), P())


def hypernetwork(p: Any, codes: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The loss of linear maps that are generated from codes [tasks, code]."""
    generated = nn.linear(torch.tanh(nn.linear(codes, p["in"])), p["out"]).unflatten(-1, (OUT, IN))
    return (x @ generated.mT - y).square().mean()


# Each rank generates the maps of its tasks.
@expert("hypernetwork, tasks split", [reduce(HIDDEN * 8 + OUT * IN * HIDDEN), LOSS])
def _() -> Program:
    p = weights(**{"in": (HIDDEN, 8), "out": (OUT * IN, HIDDEN)})
    args = p, values(32, 8), *data(32, 16)
    split = P("dp")
    return Program(grad_and_value(hypernetwork), args, DP, (P(), split, split, split), P())


def maml(p: Any, x: Tensor, y: Tensor) -> Tensor:
    """The loss after a step of each task, for x [tasks, rows, in] (MAML, arXiv:1703.03400)."""

    def adapted(x: Tensor, y: Tensor) -> Tensor:
        half = len(x) // 2
        grads = grad(error)(p, x[:half], y[:half])
        return error({k: p[k] - 0.1 * grads[k] for k in p}, x[half:], y[half:])

    return vmap(adapted)(x, y).mean()


# A rank adapts to its tasks; of their parameters' gradients only the sum over tasks is needed.
@expert("MAML, tasks split", [reduce(SIZE), LOSS])
def _() -> Program:
    args = network(), *data(16, 32)
    return Program(grad_and_value(maml), args, DP, (P(), P("dp"), P("dp")), P())


def private(p: Any, x: Tensor, y: Tensor, key: Tensor) -> Any:
    """DP-SGD (arXiv:1607.00133): examples' gradients are clipped, noise is added to the sum."""
    grads = vmap(grad(error), (None, 0, 0))(p, x, y)
    norms = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    factors = (1 / norms).clamp(max=1)
    new = {}
    for (name, g), noise_key in zip(grads.items(), random.split(key, len(p)).unbind(), strict=True):
        noise = random.normal(noise_key, g.shape[1:], g.dtype)
        new[name] = p[name] - 0.1 * (torch.einsum("n,n...->...", factors, g) + noise) / len(x)
    return new


# Gradients are clipped where their examples are; every rank draws the same noise.
@expert("DP-SGD", [reduce(SIZE)])
def _() -> Program:
    args = network(), *data(BATCH), random.key(0)
    return Program(private, args, DP, (P(), P("dp"), P("dp"), P()), P())


TIME = 16


def reinforce(p: Any, states: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    """REINFORCE with normalised advantages, on trajectories [trajectories, time, ...]."""
    returns = rewards.flip(1).cumsum(1).flip(1)
    advantages = returns - returns.mean(0)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    chosen = mlp(p, states).log_softmax(-1).gather(-1, actions[..., None])[..., 0]
    return -(chosen * advantages).mean()


# Over trajectories: the mean return at each time, the mean and the variance of all advantages,
# gradients.
@expert("REINFORCE, trajectories split", [reduce(TIME), reduce(1), reduce(1), reduce(SIZE), LOSS])
def _() -> Program:
    actions = random.randint(random.key(1), (64, TIME), 0, OUT)
    args = network(), values(64, TIME, IN), actions, values(64, TIME)
    split = P("dp")
    return Program(grad_and_value(reinforce), args, DP, (P(), split, split, split), P())


def evolve(p: Any, keys: Tensor, x: Tensor, y: Tensor) -> Any:
    """A step of evolution strategies (Salimans et al., arXiv:1703.03864), a key for each member."""
    noise = {
        k: random.normal(random.fold_in(keys, i), v.shape, v.dtype)
        for i, (k, v) in enumerate(p.items())
    }
    losses = vmap(lambda n: error({k: p[k] + 0.1 * n[k] for k in p}, x, y))(noise)
    scores = (losses - losses.mean()) / losses.std()
    return {k: p[k] - 0.1 * torch.einsum("m,m...->...", scores, noise[k]) / len(keys) for k in p}


# A rank draws and evaluates its members; the mean and variance of losses and the weighted noise are
# added up.
@expert("evolution strategies, members split", [reduce(1), reduce(1), reduce(SIZE)])
def _() -> Program:
    keys = random.split(random.key(0), 16)
    args = network(), keys, *data(BATCH)
    return Program(evolve, args, DP, (P(), P("dp"), P(), P()), P())
