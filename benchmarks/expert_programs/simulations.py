"""Iterations over states, particles and grids that are split."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchard import P, random, repeat

from .case import DP, Program, expert, gather, halo, scatter, values

STEPS, SIZE = 10, 256


def steps(x: Tensor) -> Tensor:
    return torch.zeros(STEPS, dtype=x.dtype)


def planned(transitions: Tensor, rewards: Tensor) -> Tensor:
    """The values of states after ten iterations, for transitions [actions, states, states]."""

    def step(_: Tensor, v: Tensor, t: Tensor, r: Tensor) -> Tensor:
        return (r + 0.9 * (t @ v)).amax(0)

    return repeat(step, steps(rewards), torch.zeros_like(rewards[0]), transitions, rewards)


# A rank has the transitions from its states; of all states the values are gathered in each
# iteration.
@expert("value iteration, states split", [gather(SIZE) * STEPS])
def _() -> Program:
    args = values(4, SIZE, SIZE).softmax(-1), values(4, SIZE)
    return Program(planned, args, DP, P(None, "dp"), P())


def rank_pages(links: Tensor) -> Tensor:
    """PageRank, for links [to, from] whose columns sum to 1."""

    def step(_: Tensor, v: Tensor, links: Tensor) -> Tensor:
        return 0.85 * links @ v + 0.15 / len(v)

    return repeat(step, steps(links), links.new_ones(len(links)) / len(links), links)


# A rank has the links from its pages: its terms of all ranks' pages are added up and scattered.
@expert("PageRank, columns split", [scatter(SIZE) * STEPS])
def _() -> Program:
    return Program(rank_pages, (values(SIZE, SIZE).softmax(0),), DP, P(None, "dp"), P("dp"))


def heat(grid: Tensor) -> Tensor:
    """Ten steps of the heat equation on a torus."""

    def step(_: Tensor, u: Tensor) -> Tensor:
        around = u.roll(1, 0) + u.roll(-1, 0) + u.roll(1, 1) + u.roll(-1, 1)
        return u + 0.1 * (around - 4 * u)

    return repeat(step, steps(grid), grid)


# The first and the last row of a rank are sent to its neighbours in each step.
@expert("heat equation, rows split", [halo(2 * 64) * STEPS])
def _() -> Program:
    return Program(heat, (values(64, 64),), DP, P("dp"), P("dp"))


def orbit(position: Tensor, velocity: Tensor) -> Any:
    """Ten steps of bodies [bodies, 3] that attract each other."""

    def step(_: Tensor, carry: Any) -> Any:
        x, v = carry
        apart = x[None] - x[:, None]
        force = (apart / (apart.square().sum(-1, keepdim=True) + 0.1) ** 1.5).mean(1)
        v = v + 0.01 * force
        return x + 0.01 * v, v

    return repeat(step, steps(position), (position, velocity))


# Each rank computes the forces on its bodies, from the positions of all.
@expert("bodies split", [gather(SIZE * 3) * STEPS])
def _() -> Program:
    return Program(orbit, (values(SIZE, 3), values(SIZE, 3)), DP, P("dp"), P("dp"))


def langevin(precision: Tensor, chains: Tensor, key: Tensor) -> Tensor:
    """Ten steps of Langevin dynamics of chains [chains, dim]."""

    def step(_: Tensor, x: Tensor, precision: Tensor, key: Tensor) -> Tensor:
        noise = random.normal(key, x.shape, x.dtype)
        return x - 0.05 * x @ precision + 0.1**0.5 * noise

    return repeat(step, steps(chains), chains, precision, key=key)


# Each rank draws the noise of its own chains.
@expert("Langevin dynamics, chains split")
def _() -> Program:
    args = torch.eye(16), values(SIZE, 16), random.key(0)
    return Program(langevin, args, DP, (P(), P("dp"), P()), P("dp"))
