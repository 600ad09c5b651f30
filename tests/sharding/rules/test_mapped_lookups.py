"""Lookups and additions by index under vmap keep each example with its index: nothing is gathered.

The reference is a loop over the examples.
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


X, INDEX = torch.zeros(2, 3, 2), torch.tensor([[0, 1], [1, 2]])
# Torch's own treatment: of wider sums, of arguments that it refuses, and of empty ones.
AS_TORCH: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "half precision is added in float32": (
        vmap(lambda x, i, y: x.index_add(0, i, y)),
        (X.bfloat16(), torch.zeros(2, 3000, dtype=torch.long), torch.ones(2, 3000, 2).bfloat16()),
    ),
    "too few terms": (vmap(lambda x, i, y: x.index_add(0, i, y)), (X, INDEX, torch.ones(2, 1, 2))),
    "terms of another width": (
        vmap(lambda x, i, y: x.index_add(0, i, y)),
        (X, INDEX, torch.ones(2, 2, 1)),
    ),
    "a negative index": (
        vmap(lambda x, i, y: x.index_add(0, i, y)),
        (X, INDEX - 1, torch.ones(2, 2, 2)),
    ),
    "an index beyond": (
        vmap(lambda x, i, y: x.index_add(0, i, y)),
        (X, INDEX + 3, torch.ones(2, 2, 2)),
    ),
    "terms of another dtype": (
        vmap(lambda x, i, y: x.index_add(0, i, y)),
        (X, INDEX, torch.ones(2, 2, 2).double()),
    ),
    "no terms": (
        vmap(lambda x, i, y: torch.index_add(x, 0, i, y), (None, 1, 0)),
        (torch.ones(3), torch.zeros(0, 2, dtype=torch.long), torch.zeros(2, 0)),
    ),
    "out=": (
        lambda x, i, y: torch.index_add(x, 0, i, y, out=torch.empty_like(x)),
        (X[0], INDEX[0], torch.ones(2, 2)),
    ),
    "no ids": (vmap(F.embedding, (1, 0)), (torch.zeros(0, 2, dtype=torch.long), X)),
    "padding beyond the table": (vmap(lambda i, e: F.embedding(i, e, padding_idx=9)), (INDEX, X)),
    "padding": (vmap(lambda i, e: F.embedding(i, e, padding_idx=0)), (INDEX, X + 1)),
    "no table": (lambda i: F.embedding(i, None), (INDEX,)),
    "ids in a list": (lambda e: F.embedding([0, 1], e), (X[0],)),
}


@pytest.mark.parametrize("what", AS_TORCH)
def test_all_else_is_left_to_torch(what: str) -> None:
    fn, args = AS_TORCH[what]
    run = jit(fn, backend="eager")
    try:
        want = fn(*args)
    except Exception as error:
        with pytest.raises(type(error)):
            run(*args)
    else:
        torch.testing.assert_close(run(*args), want, rtol=0, atol=0)
