"""Gradients of lookups, however they are written: each is a sum over the batch, in slices and split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from torchard import Mesh, MeshTensor, P, accumulate, pipeline, place, shard

MESH = Mesh({"dp": 2}, virtual=True)
_GENERATOR = torch.Generator().manual_seed(0)
TABLE, WEIGHT = torch.randn(7, 6, generator=_GENERATOR), torch.randn(6, 6, generator=_GENERATOR)
IDS = torch.randint(0, 7, (8, 5), generator=_GENERATOR)
X = torch.randn(8, 5, 6, generator=_GENERATOR)


def _flat(ids: torch.Tensor) -> torch.Tensor:
    return ids.reshape(-1, 1).expand(-1, 6)


Lookup = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOOKUPS: dict[str, Lookup] = {
    "embedding": lambda table, ids: F.embedding(ids, table),
    "index": lambda table, ids: table[ids],
    "negative": lambda table, ids: table[ids - 7],
    "columns": lambda table, ids: table.t()[:, ids].permute(1, 2, 0),
    "elements": lambda table, ids: table[ids, ids % 6][..., None].expand(*ids.shape, 6),
    "index_select": lambda table, ids: table.index_select(0, ids.reshape(-1)).reshape(*ids.shape, 6),
    "gather": lambda table, ids: table.gather(0, _flat(ids)).reshape(*ids.shape, 6),
    "take_along_dim": lambda table, ids: table.take_along_dim(_flat(ids), 0).reshape(*ids.shape, 6),
}


def _gradient(look_up: Lookup) -> Callable[..., Any]:
    def loss(weights: Any, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        table, weight = weights
        return (torch.tanh(look_up(table, ids) * x) @ weight).square().mean()

    return grad(loss)


def _check(have: Any, look_up: Lookup) -> None:
    for found, want in zip(have, _gradient(look_up)((TABLE, WEIGHT), IDS, X), strict=True):
        found = found.full() if isinstance(found, MeshTensor) else found
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", LOOKUPS)
def test_the_gradient_of_a_lookup_in_microbatches(name: str) -> None:
    fn = _gradient(LOOKUPS[name])
    _check(accumulate(fn, 4, batch=(None, 0, 0))((TABLE, WEIGHT), IDS, X), LOOKUPS[name])
    piped = pipeline(fn, MESH, "dp", microbatches=2, batch=(None, 0, 0))
    _check(piped((TABLE, WEIGHT), IDS, X), LOOKUPS[name])


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("spec", [P("dp"), P(None, "dp")], ids=str)
def test_the_gradient_of_a_lookup_by_split_ids(name: str, spec: P) -> None:
    run = shard(_gradient(LOOKUPS[name]), MESH)
    for table in (P(), P("dp"), P(None, "dp")):
        weights = place(TABLE, MESH, table), place(WEIGHT, MESH, P())
        _check(run(weights, place(IDS, MESH, spec), place(X, MESH, spec)), LOOKUPS[name])


def test_a_sum_into_a_table_counts_the_table_once() -> None:
    rows = IDS.reshape(-1)
    values = X.reshape(-1, 6)
    sums: dict[str, Callable[..., torch.Tensor]] = {
        "index_put": lambda t, i, v: t.index_put((i,), v, accumulate=True),
        "index_add": lambda t, i, v: t.index_add(0, i, v),
        "scatter_add": lambda t, i, v: t.scatter_add(0, i[:, None].expand(-1, 6), v),
    }
    split = place(rows, MESH, P("dp")), place(values, MESH, P("dp"))
    for fn in sums.values():
        for table in (P(), P("dp"), P(None, "dp")):
            found: Any = shard(fn, MESH)(place(TABLE, MESH, table), *split)
            torch.testing.assert_close(found.full(), fn(TABLE, rows, values))


def test_a_gradient_by_split_ids_is_one_sum() -> None:
    def loss(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (table[ids] + x).tanh().sum()

    run = shard(grad(loss), MESH)
    lowered = run.lower(place(TABLE, MESH, P()), place(IDS, MESH, P("dp")), place(X, MESH, P("dp")))
    (record,) = lowered.collectives
    assert "all_reduce" in str(record)
