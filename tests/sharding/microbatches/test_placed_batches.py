"""Batches of one call that are placed differently: a microbatch has the same rows of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from torchard import Mesh, MeshTensor, P, accumulate, pipeline, place, shard

MESH = Mesh({"dp": 2, "tp": 3}, virtual=True)
SPECS = {"dp": P("dp"), "tp": P("tp"), "both": P("dp", "tp"), "merged": P(("dp", "tp")), "whole": P()}
_GENERATOR = torch.Generator().manual_seed(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_GENERATOR, dtype=torch.float64)


TABLE, IDS, X = _random(9, 6), torch.randint(9, (24, 3), generator=_GENERATOR), _random(24, 3, 6)
LABELS = torch.randint(6, (24, 3), generator=_GENERATOR)
ARGS = TABLE, IDS, X, LABELS
BATCH = (None, 0, 0, 0)


def _loss(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(table[ids] * x)
    return F.cross_entropy(h.flatten(0, 1), y.flatten()) + (h.mean(1) * x[:, 0]).square().sum()


WANT = grad(_loss)(*ARGS)
ORDERS: dict[str, Callable[..., Any]] = {
    "shard(accumulate(grad))": lambda f, n: shard(accumulate(grad(f), n, batch=BATCH), MESH),
    "accumulate(shard(grad))": lambda f, n: accumulate(shard(grad(f), MESH), n, batch=BATCH),
    "grad(shard(accumulate))": lambda f, n: grad(shard(accumulate(f, n, batch=BATCH), MESH)),
    "accumulate(accumulate(shard))": lambda f, n: accumulate(
        accumulate(shard(grad(f), MESH), 2, batch=BATCH), n // 2, batch=BATCH
    ),
}


def _placed(*names: str) -> list[MeshTensor]:
    return [place(value, MESH, SPECS[name]) for value, name in zip(ARGS[1:], names, strict=True)]


@pytest.mark.sampled(60)
@pytest.mark.filterwarnings("ignore:.*along no value:torchard.IdleAxisWarning")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("names", [*itertools.product(SPECS, repeat=3)], ids="-".join)
def test_equals_the_plain_function(order: str, steps: int, names: tuple[str, str, str]) -> None:
    have = ORDERS[order](_loss, steps)(place(TABLE, MESH, P()), *_placed(*names))
    torch.testing.assert_close(have.full(), WANT)


@pytest.mark.parametrize("spec", [P("dp"), P()], ids=str)
def test_stated_by_specs(spec: P) -> None:
    run = shard(accumulate(grad(_loss), 4, batch=BATCH), MESH, in_specs=(P(), P("dp"), spec, P()))
    have: Any = run(*ARGS)
    torch.testing.assert_close(have.full() if isinstance(have, MeshTensor) else have, WANT)


def test_in_stages() -> None:
    run = pipeline(grad(_loss), MESH, "tp", microbatches=3, batch=BATCH)
    have: Any = run(TABLE, *_placed("dp", "whole", "dp"))
    torch.testing.assert_close(have.full() if isinstance(have, MeshTensor) else have, WANT)


def test_a_batch_that_all_ranks_have_costs_nothing() -> None:
    """Each rank slices it as its shards of the others are."""

    def sent(*names: str) -> list[tuple[str, tuple[int, ...]]]:
        run = shard(accumulate(grad(_loss), 2, batch=BATCH), MESH)
        plan = run.lower(place(TABLE, MESH, P()), *_placed(*names))
        return [(c.kind, c.shape) for c in plan.collectives]

    all_split = sent("dp", "dp", "dp")
    assert sent("dp", "whole", "dp") == sent("whole", "dp", "dp") == all_split


def _pairs(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Batches of different sizes, of which the smallest has too few rows to be cut in blocks."""
    rows = table[ids].reshape(y.shape[0], -1)
    return (rows * y).square().sum() + (x.sum(1) * table[0]).tanh().square().mean()


@pytest.mark.filterwarnings("ignore:.*along no value:torchard.IdleAxisWarning")
@pytest.mark.parametrize("names", [*itertools.product(["dp", "whole"], repeat=2)], ids="-".join)
@pytest.mark.parametrize("rows", [4, 8, 12])
def test_of_different_sizes(rows: int, names: tuple[str, str]) -> None:
    y = _random(rows, 1)
    ids, x = [value for value, _ in zip(_placed(*names, "whole"), names, strict=False)]
    run = shard(accumulate(grad(_pairs), 4, batch=BATCH), MESH)
    have: Any = run(place(TABLE, MESH, P()), ids, x, place(y, MESH, P()))
    torch.testing.assert_close(have.full(), grad(_pairs)(TABLE, IDS, X, y))
