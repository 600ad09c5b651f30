"""Recommenders, whose tables are split by rows and whose batch is split over the same axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from torchard import P, nn

from .case import DP, LOSS, TP, TWO, Program, expert, gather, ids, reduce, scatter, values, weights

ROWS, WIDTH, BATCH, BAG = 4096, 32, 64, 4


def bags(table: Tensor, index: Tensor) -> Tensor:
    """The sum of each bag's rows, for index [batch, bag]."""
    return F.embedding_bag(index, table, mode="sum")


def summed(table: Tensor, index: Tensor) -> Tensor:
    return nn.embedding(table, index).sum(1)


def arguments() -> tuple[Tensor, Tensor]:
    return values(ROWS, WIDTH), ids(BATCH, BAG, below=ROWS)


# Ids (8 bytes each) are gathered, each rank adds up those of its rows, and the terms are scattered
# over bags.
LOOKUP = [gather(BATCH * BAG, size=8), scatter(BATCH * WIDTH)]


@expert("embedding bag, table and bags split", LOOKUP)
def _() -> Program:
    return Program(bags, arguments(), DP, P("dp"), P("dp"))


@expert("embeddings summed, table and bags split", LOOKUP)
def _() -> Program:
    return Program(summed, arguments(), DP, P("dp"), P("dp"))


@expert("embedding bag, table split", [reduce(BATCH * WIDTH)])
def _() -> Program:
    return Program(bags, arguments(), TP, (P("tp"), P()), P())


# Ids are split over one axis and the table over the other: the terms of a rank's bags are added up.
# Both ranks along tp look up all of their bags' ids.
@expert("embedding bag, table and bags split, 2x2", [reduce(BATCH // 2 * WIDTH, 2)], repeats=2)
def _() -> Program:
    return Program(bags, arguments(), TWO, (P("tp"), P("dp")), P("dp"))


def click(p: Any, index: Tensor, dense: Tensor, clicked: Tensor) -> Tensor:
    """The loss of a click model: bags of ids, dense features, an MLP."""
    x = torch.cat([bags(p["table"], index), dense], 1)
    logits = nn.linear(nn.relu(nn.linear(x, p["up"])), p["down"])[:, 0]
    return F.binary_cross_entropy_with_logits(logits, clicked)


# The MLP is data parallel. The gradients of bags are gathered for the table's rows, whose ids are
# there.
MLP = 64 * 2 * WIDTH + 64


@expert("click model, table split, gradient", [*LOOKUP, gather(BATCH * WIDTH), reduce(MLP), LOSS])
def _() -> Program:
    p = weights(table=(ROWS, WIDTH), up=(64, 2 * WIDTH), down=(1, 64))
    args = p, ids(BATCH, BAG, below=ROWS), values(BATCH, WIDTH), ids(BATCH, below=2).float()
    specs = {"table": P("dp"), "up": P(), "down": P()}
    split = P("dp")
    return Program(grad_and_value(click), args, DP, (specs, split, split, split), (specs, P()))


def factorisation(p: Any, users: Tensor, items: Tensor, ratings: Tensor) -> Tensor:
    predicted = (nn.embedding(p["users"], users) * nn.embedding(p["items"], items)).sum(1)
    return (predicted - ratings).square().mean()


# Both tables are small and on all ranks: their gradients are added up.
@expert("matrix factorisation", [reduce(2 * 100 * 8), LOSS])
def _() -> Program:
    p = {"users": values(100, 8), "items": values(100, 8)}
    args = p, ids(1024, below=100), ids(1024, below=100), values(1024)
    split = P("dp")
    return Program(grad_and_value(factorisation), args, DP, (P(), split, split, split), P())
