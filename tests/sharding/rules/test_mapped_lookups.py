"""Lookups and additions by index under vmap keep each example with its index: nothing is gathered.

The reference is a loop over the examples: torch's vmap of F.embedding over tables leaves the gradient of
the padding row out in the first example only (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from torchard import Mesh, P, jit, shard
from torchard.testing import equal

B, V, D, T = 8, 20, 6, 3
GENERATOR = torch.Generator().manual_seed(0)
TABLES = torch.randint(-4, 5, (B, V, D), generator=GENERATOR).double()
IDS = torch.randint(0, V, (B, T), generator=GENERATOR)
TERMS = torch.randint(-4, 5, (B, T, D), generator=GENERATOR).double()

Fn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

CASES: dict[str, Fn] = {
    "embedding": lambda e, i, y: F.embedding(i, e) * y,
    "embedding with padding": lambda e, i, y: F.embedding(i, e, padding_idx=-3) * y,
    "embedding with padding of the first id": lambda e, i, y: (
        F.embedding(i % 3, e, padding_idx=0) * y
    ),
    "embedding, ids in a matrix": lambda e, i, y: F.embedding(i[None], e)[0] * y,
    "table[ids]": lambda e, i, y: e[i] * y,
    "index_add": lambda e, i, y: e.index_add(0, i, y),
    "index_add of one value for all": lambda e, i, y: e.index_add(
        0, i, torch.ones_like(y[:1]).expand(T, D)
    ),
    "index_add along the last dim, scaled": lambda e, i, y: e.index_add(
        -1, i % D, y.new_ones(V, T), alpha=-2
    ),
    "torch.index_add": lambda e, i, y: torch.index_add(e, 0, i, y, alpha=3),
    "index_add_": lambda e, i, y: (e * 1).index_add_(0, i, y),
    "index_add_ to a view": lambda e, i, y: _to_a_view(e * 1, i, y),
}


def _to_a_view(e: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    e[1:].t().index_add_(1, i % (V - 1), y.t())
    return e


def loop(fn: Fn, in_dims: Sequence[int | None] = (0, 0, 0)) -> Callable[..., Any]:
    """vmap, example by example."""

    def run(*args: torch.Tensor) -> Any:
        def example(b: int) -> Any:
            mapped = zip(args, in_dims, strict=True)
            return fn(*(x if d is None else x.select(d, b) for x, d in mapped))

        return optree.tree_map(lambda *xs: torch.stack(xs), *map(example, range(B)))

    return run


def loss_of(fn: Fn) -> Fn:
    return lambda e, i, y: (fn(e, i, y) ** 2).sum()


@pytest.mark.parametrize("name", CASES)
def test_examples_stay_where_they_are(name: str) -> None:
    mesh, split = Mesh({"dp": 4}, virtual=True), P("dp")
    for fn in (CASES[name], grad(loss_of(CASES[name]), (0, 2))):
        run = shard(vmap(fn), mesh, (split, split, split), split)
        assert not run.lower(TABLES, IDS, TERMS).collectives
        equal(run, loop(fn), TABLES, IDS, TERMS, orders=["value", "gradient"])


@pytest.mark.parametrize(
    "in_dims", [(0, 0, None), (None, 0, 0), (0, None, 0), (1, 0, 0), (None, None, 0)]
)
@pytest.mark.parametrize("name", CASES)
def test_what_is_mapped_may_differ(name: str, in_dims: Any) -> None:
    args = TABLES.movedim(0, 1) if in_dims[0] == 1 else TABLES, IDS, TERMS
    if "index_add_" in name.split(" ")[0] and in_dims[0] is None:
        return  # torch refuses it: the result of an example has no place in a value that all share
    given = tuple(x[0] if d is None else x for x, d in zip(args, in_dims, strict=True))
    for fn in (CASES[name], grad(loss_of(CASES[name]), (0, 2))):
        run = jit(vmap(fn, in_dims), backend="eager")
        equal(run, loop(fn, in_dims), *given, orders=["value", "gradient"])


def test_embedding_s_own_settings_are_kept() -> None:
    ids = torch.tensor([1, 1, 2])

    def scaled(e: torch.Tensor) -> torch.Tensor:
        return (F.embedding(ids, e, scale_grad_by_freq=True) ** 2).sum()

    equal(jit(grad(scaled), backend="eager"), grad(scaled), TABLES[0], orders=["value"])
