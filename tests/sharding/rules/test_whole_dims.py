"""Dims that an operation needs whole, split all the same: only statistics cross the network."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sharded_programs import equal_when_sharded

from torchard.functional import nn
from torchard.sharding import Mesh, P, place, shard

F64 = torch.float64
ROWS, D, V = 24, 32, 12
TP = Mesh({"tp": 2}, virtual=True)
DP = Mesh({"dp": 2}, virtual=True)


def loss(w: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.cross_entropy(nn.linear(x, w), ids)


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return nn.layer_norm(x, w, w)


def head(*shape: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(*shape, D, dtype=F64)
    return torch.randn(V, D, dtype=F64), x, torch.randint(0, V, shape)


CASES: dict[str, tuple[Any, ...]] = {
    # rows of logits: the largest, the sum, the target's; the loss; the gradient of x
    "cross_entropy over split classes": (
        loss,
        TP,
        head(ROWS),
        (P("tp"), P(), P()),
        {ROWS: 3, 1: 1, ROWS * D: 1},
    ),
    # the loss and its number of rows; the gradient of the weight
    "cross_entropy over split rows": (
        loss,
        DP,
        head(4, 6),
        (P(), P("dp"), P("dp")),
        {1: 2, V * D: 1},
    ),
    # mean and variance; in the backward two means, merged
    "layer_norm over the split dim": (
        norm,
        TP,
        (torch.randn(ROWS, D, dtype=F64), torch.randn(D, dtype=F64)),
        (P(None, "tp"), P("tp")),
        {ROWS: 2, 2 * ROWS: 1},
    ),
    # the gradients of weight and bias, which are one parameter
    "layer_norm over split rows": (
        norm,
        DP,
        (torch.randn(ROWS, D, dtype=F64), torch.randn(D, dtype=F64)),
        (P("dp"), P()),
        {D: 1},
    ),
    "softmax over the split dim": (
        lambda x: torch.softmax(x, -1),
        TP,
        (torch.randn(ROWS, D, dtype=F64),),
        (P(None, "tp"),),
        {ROWS: 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_only_statistics_cross(name: str) -> None:
    fn, mesh, args, specs, elements = CASES[name]
    found = shard(fn, mesh).lower_joint(*place(args, mesh, specs)).collectives
    assert {c.kind for c in found} == {"all_reduce"}
    sent = [math.prod(c.shape) for c in found]
    assert {n: sent.count(n) for n in sent} == elements, str(found)
    equal_when_sharded(fn, args, mesh, specs)
