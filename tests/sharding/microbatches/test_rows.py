"""Lookups that each example does on its own, and their gradients, in microbatches and split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from torchard import AccumulateError, Mesh, P, accumulate, place, shard
from torchard.testing import prove

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
    "columns": lambda table, ids: table.t()[:, ids].movedim(0, -1),
    "elements": lambda table, ids: table[ids, ids % 6][..., None].expand(*ids.shape, 6),
    "index_select": lambda table, ids: table.index_select(0, ids.reshape(-1)).reshape(*ids.shape, 6),
    "gather": lambda table, ids: table.gather(0, _flat(ids)).reshape(*ids.shape, 6),
    "take_along_dim": lambda table, ids: table.take_along_dim(_flat(ids), 0).reshape(*ids.shape, 6),
}


def _clipped(look_up: Lookup, tied: bool) -> Callable[..., torch.Tensor]:
    """The sum of the examples' gradients, each clipped; the table is used twice if tied."""

    def loss(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(look_up(table, ids) * x)
        return F.cross_entropy(found @ table.T, ids % 7) if tied else found.square().sum()

    def step(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        each = vmap(grad(loss), (None, 0, 0))(table, ids, x)
        factors = (1 / each.flatten(1).norm(dim=1)).clamp(max=1.0)
        return (each * factors[:, None, None]).sum(0)

    return step


@pytest.mark.parametrize("tied", [False, True], ids=["once", "tied"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_clipped_gradients_of_examples(name: str, tied: bool) -> None:
    fn = _clipped(LOOKUPS[name], tied)
    want = fn(TABLE, IDS, X)
    in_turn = accumulate(fn, 4, batch=(None, 0, 0))
    if tied and name == "index_select":  # vmap takes its gradient one example at a time
        with pytest.raises(AccumulateError, match=r"single examples .* index_select: use table\[ids\]"):
            in_turn(TABLE, IDS, X)
    else:
        torch.testing.assert_close(in_turn(TABLE, IDS, X), want)
    ids, x = (place(value, MESH, P("dp")) for value in (IDS, X))
    run = shard(fn, MESH)
    found: Any = run(place(TABLE, MESH, P()), ids, x)
    torch.testing.assert_close(found.full(), want)
    prove(run.lower(place(TABLE, MESH, P()), ids, x))


PICKED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "one of each row": lambda x, ids: x[torch.arange(8), ids[:, 0] % 5],
    "some of each row": lambda x, ids: x[torch.arange(8)[:, None], ids % 5],
    "expanded": lambda x, ids: x[torch.arange(8)[:, None].expand(8, 5), ids % 5],
    "apart": lambda x, ids: x[torch.arange(8)[:, None], :, ids % 6],
    "last": lambda x, ids: x.movedim(0, 2)[ids % 5, :, torch.arange(8)[:, None]],
    "ids of all": lambda x, ids: x[torch.arange(8)[:, None], torch.tensor([0, 3, 3])],
    "counted twice": lambda x, ids: x[:, :5, :5][torch.arange(8)[:, None], torch.arange(5)],
    "written": lambda x, ids: x.index_put((torch.arange(8), ids[:, 0] % 5), x[:, 0]),
    "added": lambda x, ids: x.index_put((torch.arange(8)[:, None], ids % 5), x, accumulate=True),
}


@pytest.mark.parametrize("name", PICKED)
def test_elements_picked_in_each_row(name: str) -> None:
    def loss(weight: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return PICKED[name](x @ weight, ids).sin().square().mean()

    fn = grad(loss, argnums=(0, 1))
    want = fn(WEIGHT, X, IDS)
    for have in zip(accumulate(fn, 4, batch=(None, 0, 0))(WEIGHT, X, IDS), want, strict=True):
        torch.testing.assert_close(*have)
    run = shard(fn, MESH)
    placed = place(WEIGHT, MESH, P()), place(X, MESH, P("dp")), place(IDS, MESH, P("dp"))
    for found, expected in zip(run(*placed), want, strict=True):
        torch.testing.assert_close(found.full(), expected)
    lowered = run.lower(*placed)
    assert "all_gather" not in str(lowered.collectives)
    prove(lowered)
