"""Gradients of lookups, however they are written, are sums over the ids: in microbatches and split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from torchard import Mesh, MeshTensor, P, accumulate, jit, pipeline, place, repeat, shard
from torchard.testing import prove

MESH = Mesh({"dp": 2, "tp": 2}, virtual=True)
BATCH = (None, 0, 0)
_GENERATOR = torch.Generator().manual_seed(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_GENERATOR, dtype=torch.float64)


TABLE, WEIGHT, X = _random(7, 6), _random(6, 6), _random(8, 5, 6)
# Repeated, negative, and some rows never.
IDS = torch.randint(-6, 6, (8, 5), generator=_GENERATOR)


def _flat(ids: torch.Tensor) -> torch.Tensor:
    return ids.reshape(-1) % 6


def _expanded(ids: torch.Tensor) -> torch.Tensor:
    return _flat(ids)[:, None].expand(-1, 6)


Lookup = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOOKUPS: dict[str, Lookup] = {
    "embedding": lambda table, ids: F.embedding(ids % 6, table),
    "rows": lambda table, ids: table[ids],
    "flat": lambda table, ids: table[ids.reshape(-1)].reshape(*ids.shape, 6),
    "columns": lambda table, ids: table.T[:, ids].permute(1, 2, 0),
    "with None": lambda table, ids: table[None, ids, None, :].squeeze(0).squeeze(2),
    "part of a row": lambda table, ids: F.pad(table[ids, 1:4], (1, 2)),
    "elements": lambda table, ids: table[ids, ids.flip(1)][..., None].expand(*ids.shape, 6),
    "broadcast": lambda table, ids: table[ids[..., None], ids[:, :1, None]].expand(*ids.shape, 6),
    "apart": lambda table, ids: table.reshape(7, 2, 3)[ids, :, ids % 3].repeat(1, 1, 3),
    "twice": lambda table, ids: table[ids] + table[ids.flip(1)],
    "index_select": lambda table, ids: table.index_select(0, _flat(ids)).reshape(*ids.shape, 6),
    "gather": lambda table, ids: table.gather(0, _expanded(ids)).reshape(*ids.shape, 6),
    "take_along_dim": lambda table, ids: table.take_along_dim(_expanded(ids), 0).view(*ids.shape, 6),
    "put": lambda table, ids: table.index_put((ids,), table[ids].sin(), accumulate=True)[ids],
    "put, broadcast": lambda table, ids: table.index_put((ids,), table[0], accumulate=True)[ids],
    "index_add": lambda table, ids: table.index_add(0, _flat(ids), table[_flat(ids)], alpha=2)[ids],
    "scatter_add": lambda table, ids: table.scatter_add(0, _expanded(ids), table[_flat(ids)])[ids],
}


def _loss(name: str) -> Callable[..., torch.Tensor]:
    def loss(weights: Any, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        table, weight = weights
        return (torch.tanh(LOOKUPS[name](table, ids) * x) @ weight).square().mean()

    return loss


def _check(have: Any, want: Any) -> None:
    for found, expected in zip(have, want, strict=True):
        found = found.full() if isinstance(found, MeshTensor) else found
        torch.testing.assert_close(found, expected)


ARGS = (TABLE, WEIGHT), IDS, X
WANT = {name: grad(_loss(name))(*ARGS) for name in LOOKUPS}
# Each example reads what all have added: refused in microbatches.
_WAITING = ("put", "put, broadcast", "index_add", "scatter_add")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [n for n in LOOKUPS if n not in _WAITING])
def test_in_microbatches(name: str) -> None:
    loss = _loss(name)
    _check(accumulate(grad(loss), 4, batch=BATCH)(*ARGS), WANT[name])
    _check(grad(accumulate(loss, 2, batch=BATCH))(*ARGS), WANT[name])


@pytest.mark.parametrize("name", ["rows", "elements", "index_select"])
def test_in_stages(name: str) -> None:
    loss = _loss(name)
    piped = pipeline(grad(loss), MESH, "dp", microbatches=2, batch=BATCH)
    _check(piped(*ARGS), WANT[name])
    outside = grad(pipeline(loss, MESH, "dp", microbatches=2, batch=BATCH))
    _check(outside(*ARGS), WANT[name])


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("table", [P(), P("tp"), P(None, "tp"), P("dp")], ids=str)
@pytest.mark.parametrize("spec", [P("dp"), P(None, "dp"), P("dp", "tp")], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_split(name: str, table: P, spec: P, inside: bool) -> None:
    loss, weights = _loss(name), (place(TABLE, MESH, table), place(WEIGHT, MESH, P()))
    args = weights, place(IDS, MESH, spec), place(X, MESH, spec)
    if inside:
        run = shard(grad(loss), MESH)
        _check(run(*args), WANT[name])
        prove(run.lower(*args))
    else:
        _check(grad(shard(loss, MESH))(*args), WANT[name])


@pytest.mark.parametrize("spec", [P(), P("tp"), P(None, "dp")], ids=str)
@pytest.mark.parametrize("shape", [(6,), ()], ids=["rows", "broadcast"])
def test_a_sum_into_a_table_counts_the_table_once(shape: tuple[int, ...], spec: P) -> None:
    def put(table: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return table.index_put((ids,), values.sin(), accumulate=True)

    values = X.reshape(-1, 6)[:, : 6 if shape else 1]
    args, want = (TABLE, IDS.reshape(-1), values), put(TABLE, IDS.reshape(-1), values)
    torch.testing.assert_close(accumulate(put, 4, batch=BATCH)(*args), want)
    found: Any = shard(put, MESH)(*map(place, args, [MESH] * 3, [spec, P("dp"), P("dp")]))
    torch.testing.assert_close(found.full(), want)


@pytest.mark.parametrize("name", ["rows", "columns", "elements", "index_select", "gather"])
def test_sends_what_an_embedding_does(name: str) -> None:
    """One sum of the table's gradient, however the gradient is taken."""

    def loss(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(LOOKUPS[name](table, ids) * x).sum()

    args = place(TABLE, MESH, P()), place(IDS, MESH, P("dp")), place(X, MESH, P("dp"))
    for fn in (grad(loss), accumulate(grad(loss), 2, batch=BATCH)):
        (sent,) = shard(fn, MESH).lower(*args).collectives
        assert (sent.kind, sorted(sent.shape)) == ("all_reduce", sorted(TABLE.shape))


def test_under_other_transforms() -> None:
    """A gradient for each of several tables, in a loop, and compiled."""
    tables = torch.stack([TABLE, 2 * TABLE, TABLE.flip(0)])
    ids, x = IDS, X

    def each(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return grad(lambda t: torch.tanh(t[ids] * x).sum())(table)

    def looped(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return repeat(lambda _, t: t - 0.1 * each(t, ids, x), torch.zeros(3), table)

    for fn in (vmap(each, (0, None, None)), looped):
        first = tables if fn is not looped else TABLE
        want = fn(first, ids, x)
        torch.testing.assert_close(accumulate(fn, 4, batch=BATCH)(first, ids, x), want)
        run = shard(jit(fn, backend="eager"), MESH)
        found: Any = run(place(first, MESH, P()), place(ids, MESH, P("dp")), place(x, MESH, P("dp")))
        torch.testing.assert_close(found.full(), want)
