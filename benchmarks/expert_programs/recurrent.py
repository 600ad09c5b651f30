"""Recurrent networks and ODEs, whose steps are a loop over time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value

from torchard import P, nn, repeat

from .case import DP, LOSS, TP, TWO, Program, expert, gather, reduce, values, weights

BATCH, TIME, WIDTH = 64, 12, 32
GRU_SIZE = 3 * WIDTH * (2 * WIDTH + 1)
LSTM_SIZE = 4 * WIDTH * (2 * WIDTH + 1)


def gru(p: Any, x: Tensor) -> Tensor:
    """The last state [batch, width] for x [batch, time, width]."""

    def step(x: Tensor, h: Tensor, p: Any) -> Tensor:
        xr, xz, xn = nn.linear(x, p["in"], p["b"]).chunk(3, -1)
        hr, hz, hn = nn.linear(h, p["state"]).chunk(3, -1)
        update = torch.sigmoid(xz + hz)
        new = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return update * h + (1 - update) * new

    return repeat(step, x.movedim(1, 0), x.new_zeros(len(x), WIDTH), p)


def lstm(p: Any, x: Tensor) -> Tensor:
    """All states [time, batch, width] for x [batch, time, width]."""

    def step(x: Tensor, carry: Any, p: Any) -> Any:
        h, c = carry
        i, f, g, o = (nn.linear(x, p["in"], p["b"]) + nn.linear(h, p["state"])).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h

    zero = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
    return repeat(step, x.movedim(1, 0), (zero, zero), p, collect=True)[1]


def gru_by_loop(p: Any, x: Tensor) -> Tensor:
    """The last state, by a Python loop over time."""
    h = torch.zeros(x.size(0), WIDTH, dtype=x.dtype)
    for t in range(x.size(1)):
        xr, xz, xn = nn.linear(x[:, t], p["in"], p["b"]).chunk(3, -1)
        hr, hz, hn = nn.linear(h, p["state"]).chunk(3, -1)
        update = torch.sigmoid(xz + hz)
        h = update * h + (1 - update) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return h


def cell(gates: int) -> Any:
    units = gates * WIDTH
    return weights(**{"in": (units, WIDTH), "state": (units, WIDTH), "b": (units,)})


def gradient(model: Any) -> Any:
    return grad_and_value(lambda p, x: model(p, x).square().mean())


# Each rank runs its own sequences: the carry's zeros are split like the batch.
@expert("GRU, forward")
def _() -> Program:
    return Program(gru, (cell(3), values(BATCH, TIME, WIDTH)), DP, (P(), P("dp")), P("dp"))


@expert("LSTM, forward")
def _() -> Program:
    args = cell(4), values(BATCH, TIME, WIDTH)
    return Program(lstm, args, DP, (P(), P("dp")), P(None, "dp"))


# Each rank adds up the weights' gradients over time; one all_reduce after the loop, not one in each
# step.
@expert("GRU, gradient", [reduce(GRU_SIZE), LOSS])
def _() -> Program:
    return Program(gradient(gru), (cell(3), values(BATCH, TIME, WIDTH)), DP, (P(), P("dp")), P())


@expert("LSTM, gradient", [reduce(LSTM_SIZE), LOSS])
def _() -> Program:
    return Program(gradient(lstm), (cell(4), values(BATCH, TIME, WIDTH)), DP, (P(), P("dp")), P())


@expert("GRU by a Python loop, gradient", [reduce(GRU_SIZE), LOSS])
def _() -> Program:
    args = cell(3), values(BATCH, TIME, WIDTH)
    return Program(gradient(gru_by_loop), args, DP, (P(), P("dp")), P())


# The batch is split over both axes.
@expert("LSTM, gradient, 2x2", [reduce(LSTM_SIZE), LOSS])
def _() -> Program:
    args = cell(4), values(BATCH, TIME, WIDTH)
    return Program(gradient(lstm), args, TWO, (P(), P(("dp", "tp"))), P())


def tanh_rnn(p: Any, x: Tensor) -> Tensor:
    def step(x: Tensor, h: Tensor, p: Any) -> Tensor:
        return torch.tanh(nn.linear(x, p["in"]) + nn.linear(h, p["state"]))

    return repeat(step, x.movedim(1, 0), torch.zeros(x.shape[0], 256, dtype=x.dtype), p)


# Each rank computes its units from the entire state, which is gathered once a step, the result
# included; to gather `state` (256 x 256) instead would send more, and every rank would compute all
# units.
@expert("RNN, units split, forward", [gather(8 * 256) * TIME])
def _() -> Program:
    p = weights(**{"in": (256, WIDTH), "state": (256, 256)})
    return Program(tanh_rnn, (p, values(8, TIME, WIDTH)), TP, (P("tp"), P()), P())


def ode(p: Any, x: Tensor) -> Tensor:
    """Eight Runge-Kutta steps from x [batch, width]."""

    def field(x: Tensor, p: Any) -> Tensor:
        return nn.linear(torch.tanh(nn.linear(x, p["up"])), p["down"])

    def step(t: Tensor, x: Tensor, p: Any) -> Tensor:
        k1 = field(x, p)
        k2 = field(x + t / 2 * k1, p)
        k3 = field(x + t / 2 * k2, p)
        k4 = field(x + t * k3, p)
        return x + t / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return repeat(step, torch.full((8,), 0.125, dtype=x.dtype), x, p)


# As in data parallelism: each rank solves for its rows, and adds up gradients over the steps.
@expert("neural ODE, gradient", [reduce(2 * 32 * 64), LOSS])
def _() -> Program:
    p = weights(up=(64, 32), down=(32, 64))
    return Program(gradient(ode), (p, values(128, 32)), DP, (P(), P("dp")), P())
