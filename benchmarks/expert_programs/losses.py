"""Losses that compare the examples of a batch with each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from torchard import P, nn

from .case import (
    DP,
    LOSS,
    TWO,
    Program,
    expert,
    gather,
    ids,
    reduce,
    scatter,
    values,
    weights,
)

BATCH, IN, WIDTH = 256, 32, 64


def encoded(w: Tensor, x: Tensor) -> Tensor:
    return F.normalize(nn.linear(x, w), dim=-1)


def clip(p: Any, images: Tensor, texts: Tensor) -> Tensor:
    """CLIP's loss (Radford et al., arXiv:2103.00020, figure 3)."""
    logits = encoded(p["image"], images) @ encoded(p["text"], texts).T * p["scale"].exp()
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def towers() -> Any:
    return {**weights(image=(WIDTH, IN), text=(WIDTH, IN)), "scale": torch.tensor(1.0)}


# A rank has its rows of the logits: texts are gathered, their gradient's terms are scattered, and
# the softmax over columns adds up a maximum and a sum for each. The target's logit is in the rank's
# own rows.
@expert(
    "CLIP",
    [
        *(gather(BATCH * WIDTH), scatter(BATCH * WIDTH), reduce(BATCH), reduce(BATCH)),
        *(reduce(2 * WIDTH * IN + 1), LOSS),
    ],
)
def _() -> Program:
    args = towers(), values(BATCH, IN), values(BATCH, IN)
    return Program(grad_and_value(clip), args, DP, (P(), P("dp"), P("dp")), P())


# The batch is split over both axes: the same.
@expert(
    "CLIP, 2x2",
    [
        *(gather(BATCH * WIDTH), scatter(BATCH * WIDTH), reduce(BATCH), reduce(BATCH)),
        *(reduce(2 * WIDTH * IN + 1), LOSS),
    ],
)
def _() -> Program:
    args, split = (towers(), values(BATCH, IN), values(BATCH, IN)), P(("dp", "tp"))
    return Program(grad_and_value(clip), args, TWO, (P(), split, split), P())


def in_batch(p: Any, users: Tensor, items: Tensor) -> Tensor:
    """The softmax of each user's item over all items of the batch."""
    logits = encoded(p["user"], users) @ encoded(p["item"], items).T * 10
    return F.cross_entropy(logits, torch.arange(len(users)))


# As above, without the softmax over columns.
@expert(
    "two towers, in-batch softmax",
    [gather(BATCH * WIDTH), scatter(BATCH * WIDTH), reduce(2 * WIDTH * IN), LOSS],
)
def _() -> Program:
    args = weights(user=(WIDTH, IN), item=(WIDTH, IN)), values(BATCH, IN), values(BATCH, IN)
    return Program(grad_and_value(in_batch), args, DP, (P(), P("dp"), P("dp")), P())


def simclr(w: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """NT-Xent of two views (SimCLR, Chen et al., arXiv:2002.05709, algorithm 1)."""
    z = encoded(w, torch.cat([first, second]))
    count = len(first)
    logits = (z @ z.T * 2).fill_diagonal_(-torch.inf)
    labels = torch.cat([torch.arange(count) + count, torch.arange(count)])
    return F.cross_entropy(logits, labels)


# A rank keeps both views of its examples; the embeddings of both are gathered, and gradients' terms
# scattered.
@expert(
    "SimCLR",
    [gather(2 * BATCH * WIDTH), scatter(2 * BATCH * WIDTH), reduce(WIDTH * IN), LOSS],
)
def _() -> Program:
    args = weights(w=(WIDTH, IN))["w"], values(BATCH, IN), values(BATCH, IN)
    return Program(grad_and_value(simclr), args, DP, (P(), P("dp"), P("dp")), P())


def barlow(w: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Barlow Twins (Zbontar et al., arXiv:2103.03230, algorithm 1)."""

    def standard(x: Tensor) -> Tensor:
        z = nn.linear(x, w)
        return (z - z.mean(0)) / z.std(0)

    correlation = standard(first).T @ standard(second) / len(first)
    off = correlation - torch.eye(len(correlation), dtype=w.dtype)
    return off.square().sum()


# For each view a mean and a variance, in the backward two sums; and the correlations.
@expert("Barlow Twins", [reduce(WIDTH) * 8, reduce(WIDTH * WIDTH), reduce(WIDTH * IN)])
def _() -> Program:
    args = weights(w=(WIDTH, IN))["w"], values(BATCH, IN), values(BATCH, IN)
    return Program(grad_and_value(barlow), args, DP, (P(), P("dp"), P("dp")), P())


CLASSES = 10


def prototypes(p: Any, support: Tensor, labels: Tensor, queries: Tensor, targets: Tensor) -> Tensor:
    """The loss of prototypical networks (Snell et al., arXiv:1703.05175)."""
    members = F.one_hot(labels, CLASSES).to(support.dtype)
    centers = members.T @ nn.linear(support, p["w"]) / members.sum(0)[:, None]
    distances = torch.cdist(nn.linear(queries, p["w"]), centers)
    return F.cross_entropy(-distances.square(), targets)


# The sums and counts of classes are added up, and so are the gradient's terms of the class means.
@expert(
    "prototypical network",
    [
        *(reduce(CLASSES * WIDTH), reduce(CLASSES), reduce(CLASSES * WIDTH)),
        *(reduce(WIDTH * IN), LOSS, LOSS),
    ],
)
def _() -> Program:
    # Every class has members: labels count through the classes.
    args = (
        *(weights(w=(WIDTH, IN)), values(BATCH, IN), torch.arange(BATCH) % CLASSES),
        *(values(BATCH, IN), ids(BATCH, below=CLASSES)),
    )
    return Program(grad_and_value(prototypes), args, DP, (P(), *[P("dp")] * 4), P())


def matching(logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """DETR's cost of pairs [batch, queries, objects], by Sinkhorn steps a soft matching."""
    probabilities = logits.softmax(-1)
    index = labels[:, None].expand(-1, logits.shape[1], -1)
    cost = 5 * torch.cdist(boxes, targets, p=1) - probabilities.gather(-1, index)
    plan = -cost
    for _ in range(4):
        plan = plan - plan.logsumexp(1, keepdim=True)
        plan = plan - plan.logsumexp(2, keepdim=True)
    return plan.exp()


# Each image is matched by itself.
@expert("DETR's matching")
def _() -> Program:
    args = values(16, 20, CLASSES), values(16, 20, 4), ids(16, 6, below=CLASSES), values(16, 6, 4)
    return Program(matching, args, DP, P("dp"), P("dp"))


def neighbours(queries: Tensor, points: Tensor) -> Any:
    """The distances and indices of the five nearest points."""
    return torch.cdist(queries, points).topk(5, largest=False)


# Every rank reads all points, which are more than its distances.
@expert("nearest neighbours, queries split", repeats=1.5)
def _() -> Program:
    args = values(64, IN), values(2048, IN)
    return Program(neighbours, args, DP, (P("dp"), P()), P("dp"))


# Each rank finds the five nearest of its points; these distances and indices (as int32) are
# gathered.
@expert("nearest neighbours, points split", [gather(4 * 64 * 5), gather(4 * 64 * 5)])
def _() -> Program:
    args = values(64, IN), values(2048, IN)
    return Program(neighbours, args, DP, (P(), P("dp")), P())
