"""Rows that each example reads or adds to: whatever divides the batch, slices, a mesh, or both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from torchard import Mesh, P, accumulate, full, shard
from torchard.testing import prove

Fn = Callable[..., Any]
CLASSES, WIDTH = 6, 4
LOOKUPS: dict[str, Fn] = {
    "embedding": lambda table, ids: F.embedding(ids, table),
    "padded": lambda table, ids: F.embedding(ids, table, padding_idx=2),
    "rows": lambda table, ids: table[ids],
    "negative": lambda table, ids: table[ids - CLASSES],
    "columns": lambda table, ids: table.T[:, ids].movedim(0, -1),
}


def _per_example(look_up: Fn, linear: bool) -> Fn:
    """The sum of the examples' gradients of a table, each clipped."""

    def loss(table: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found = look_up(table, ids) * x
        return found.sum() if linear else found.sin().sum()

    def step(table: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> Any:
        each = vmap(grad(loss), (None, 0, 0))(table, ids, x @ weight)
        norms = each.flatten(1).norm(dim=1)
        return (each * (1 / norms).clamp(max=1.0)[:, None, None]).sum(0), norms

    return step


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x))


PICKED: dict[str, Fn] = {
    "one": lambda x, ids: x[_rows(x), ids[:, 0] % 3],
    "some": lambda x, ids: x[_rows(x)[:, None], ids % 3],
    "expanded": lambda x, ids: x[_rows(x)[:, None].expand(-1, 3), ids % 3],
    "apart": lambda x, ids: x[_rows(x)[:, None], :, ids % WIDTH],
    "int32": lambda x, ids: x[_rows(x).int()[:, None], ids.int() % 3],
    "negative": lambda x, ids: x[_rows(x), ids[:, 0] % 3 - 3, ids[:, 1] % WIDTH],
    "second": lambda x, ids: x.transpose(0, 1)[ids[:, 0] % 3, _rows(x)],
    "flat": lambda x, ids: x.flatten(0, 1)[torch.arange(x.shape[0] * 3), ids.flatten() % WIDTH],
    "written": lambda x, ids: x.index_put((_rows(x), ids[:, 0] % 3), x[:, 0]),
    "added": lambda x, ids: x.index_put((_rows(x)[:, None], ids % 3), x, accumulate=True),
}


def _picked(pick: Fn, linear: bool) -> Fn:
    def loss(table: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, x: torch.Tensor) -> Any:
        found = pick(x @ weight @ table.T[:, :WIDTH], ids)
        return found.sum() if linear else found.sin().sum()

    return loss


def _gradients(loss: Fn) -> Fn:
    return grad(loss, argnums=(0, 1, 3))


FUNCTIONS = {
    **{f"per example, {name}": (_per_example, fn) for name, fn in LOOKUPS.items()},
    **{f"picked, {name}": (_picked, fn) for name, fn in PICKED.items()},
}
BATCH = (None, None, 0, 0)
ORDERS: dict[str, Callable[[Fn, Mesh, tuple[P, ...], int], Fn]] = {
    "shard": lambda fn, mesh, specs, steps: shard(fn, mesh, in_specs=specs),
    "accumulate(shard)": lambda fn, mesh, specs, steps: accumulate(
        shard(fn, mesh, in_specs=specs), steps, batch=BATCH
    ),
    "shard(accumulate)": lambda fn, mesh, specs, steps: shard(
        accumulate(fn, steps, batch=BATCH), mesh, in_specs=specs
    ),
}


def _placed(choose: random.Random) -> tuple[Mesh, tuple[P, ...]]:
    """A mesh, and specs of the table, the weight, the ids and the values."""
    mesh = Mesh({"dp": choose.choice([2, 3, 4]), "tp": 2}, virtual=True)
    batch = choose.choice([P("dp"), P("dp"), P("dp"), P(("dp", "tp")), P("tp"), P(None, None)])
    if batch.axes != {"dp"}:
        return mesh, (P(), P(), batch, batch)
    table = choose.choice([P(), P(), P("tp"), P(None, "tp")])
    return mesh, (table, choose.choice([P(), P(None, "tp")]), batch, batch)


def _check(name: str, order: str, mesh: Mesh, specs: tuple[P, ...], sizes: tuple[int, int]) -> None:
    make, how = FUNCTIONS[name]
    examples, steps = sizes
    fn: Any = make(how, linear=examples % 3 == 0)
    run: Any = ORDERS[order](fn, mesh, specs, steps)
    if make is _picked:
        outside = examples % 4 == 0  # what its backward reads is handed on by its forward
        run = _gradients(run) if outside else ORDERS[order](_gradients(fn), mesh, specs, steps)
        fn = _gradients(fn)
    generator = torch.Generator().manual_seed(examples)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = torch.randint(CLASSES, (examples, 3), generator=generator)
    args = normal(CLASSES, WIDTH), normal(WIDTH, WIDTH), ids, normal(examples, 3, WIDTH)
    torch.testing.assert_close(full(run(*args)), fn(*args))
    if order == "shard" and hasattr(run, "lower"):
        prove(run.lower(*args))


CASES = list(itertools.product(FUNCTIONS, ORDERS, range(3)))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n])))
def test_batches_divided_in_any_way(number: int) -> None:
    name, order, _ = CASES[number]
    choose = random.Random(number)
    sizes = choose.choice([(7, 7), (8, 2), (8, 4), (9, 3), (10, 2), (12, 2), (12, 3)])
    _check(name, order, *_placed(choose), sizes)


@pytest.mark.parametrize("name", ["per example, embedding", "per example, rows", "picked, one"])
@pytest.mark.parametrize("order, examples", [("shard", 7), ("accumulate(shard)", 8)])
def test_a_batch_over_two_ranks(name: str, order: str, examples: int) -> None:
    """Not evenly, and evenly: then each shard has a part in every slice."""
    mesh, batch = Mesh({"dp": 2}, virtual=True), P("dp")
    _check(name, order, mesh, (P(), P(), batch, batch), (examples, 2))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("linear", [True, False])
def test_ids_that_a_user_moves_by_row_numbers(order: str, linear: bool) -> None:
    """They have the form of vmap's ids for a table per example, but need not stay in a row's own part."""
    generator = torch.Generator().manual_seed(0)
    moved = torch.randperm(8, generator=generator) - torch.arange(8)
    table, x = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))

    def loss(table: torch.Tensor, _: None, moved: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        found = F.embedding(torch.arange(8) + moved, table) * x
        return found.sum() if linear else found.sin().sum()

    specs = P(), P(), P("dp"), P("dp")
    run = ORDERS[order](grad(loss), Mesh({"dp": 2}, virtual=True), specs, 2)
    torch.testing.assert_close(full(run(table, None, moved, x)), grad(loss)(table, None, moved, x))
