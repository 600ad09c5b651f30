"""Writes, bags and sums by index, each in one row of the batch: in microbatches, split, in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from torchard import Mesh, P, accumulate, jit, pipeline, place, shard, trace, tree

MESH = Mesh({"dp": 2, "tp": 2}, virtual=True)
ROWS, BATCH = 8, (None, 0, 0, 0)
_GENERATOR = torch.Generator().manual_seed(0)
TABLE = torch.randn(7, 6, generator=_GENERATOR, dtype=torch.float64)
X = torch.randn(ROWS, 6, generator=_GENERATOR, dtype=torch.float64)
Y = torch.randint(6, (ROWS,), generator=_GENERATOR)
IDS = torch.randint(6, (ROWS, 3), generator=_GENERATOR)
PADDING = int(IDS[0, 0])
ARGS = TABLE, X, Y, IDS
Fn = Callable[[Any, Any, Any, Any], torch.Tensor]


def _written(index: str, value: str, into: str = "x.clone()") -> Fn:
    """A function that writes to rows of a value: ``out[index] = value``."""
    text = f"def fn(t, x, y, ids):\n out = {into}; rows = torch.arange(len(x))\n out[{index}] {value}\n"
    names: dict[str, Any] = {"torch": torch}
    exec(f"{text} return out * x", names)
    fn: Fn = names["fn"]
    return fn


FUNCTIONS: dict[str, Fn] = {
    "a number": _written("rows, y", "= 1.0", "torch.zeros_like(x)"),
    "a number at ids": _written("rows[:, None], ids", "= 0.0"),
    "a number added": _written("rows, y", "+= 1.0"),
    "a number of each": _written("rows, y", "= x[:, 0]", "torch.zeros_like(x)"),
    "a mean of each": _written("rows, y", "= x.mean(1)", "torch.zeros(len(x), 6, dtype=x.dtype)"),
    "looked up": _written("rows, y", "-= t[y, 0]"),
    "columns": _written(":, [0, 2]", "= t[y][:, [1, 3]]"),
    "one for columns": _written(":, torch.arange(3)", "= t[0, 0]"),
    "a column for columns": _written(":, [0, 2, 4]", "= x[:, :1]"),
    "put": lambda t, x, y, ids: x.index_put((torch.arange(len(x)), y), x.new_ones(())) * x,
    "put, accumulated": lambda t, x, y, ids: (
        x.index_put((torch.arange(len(x)), y), x.new_ones(()), accumulate=True) * x
    ),
    "labels": lambda t, x, y, ids: torch.full_like(x, 0.1).scatter_(1, y[:, None], 0.9) * x,
    "scattered": lambda t, x, y, ids: torch.zeros_like(x).scatter_(1, ids, x[:, :3]) * x,
    "summed": lambda t, x, y, ids: torch.zeros_like(x).scatter_reduce(1, ids, x[:, :3], "sum") * x,
    "means": lambda t, x, y, ids: x.scatter_reduce(1, ids, t[y][:, :3], "mean") * x,
    "maxima": lambda t, x, y, ids: x.scatter_reduce(1, y[:, None], x[:, :1] * 2, "amax") * x,
    "one-hot": lambda t, x, y, ids: (F.one_hot(y, 7).to(x.dtype) @ t) * x,
    "taken": lambda t, x, y, ids: t.take(ids).sum(1, keepdim=True) * x,
    "padded": lambda t, x, y, ids: F.embedding(ids, t, padding_idx=2).sum(1) * x,
    "picked in vmap": lambda t, x, y, ids: vmap(lambda i, row: row * row[i])(y, x),
    "a sum of bags": lambda t, x, y, ids: F.embedding_bag(ids, t, mode="sum") * x,
    "a mean of bags": lambda t, x, y, ids: F.embedding_bag(ids, t) * x,
    "a mean of padded bags": lambda t, x, y, ids: F.embedding_bag(ids, t, padding_idx=PADDING) * x,
    "a sum of padded bags": lambda t, x, y, ids: F.embedding_bag(ids, t, mode="sum", padding_idx=-2) * x,
    "weighted bags": lambda t, x, y, ids: (
        F.embedding_bag(ids, t, mode="sum", per_sample_weights=x[:, :3]) * x
    ),
}


def _gradients(fn: Fn) -> Callable[..., Any]:
    return grad(lambda *args: fn(*args).tanh().square().sum(), (0, 1))


def _placed(table: P, *specs: P) -> tuple[Any, ...]:
    return tuple(place(v, MESH, s) for v, s in zip(ARGS, (table, *specs), strict=True))


DP = P("dp")
RUNS: dict[str, Callable[[Fn], Any]] = {
    "accumulate": lambda fn: accumulate(_gradients(fn), 4, batch=BATCH)(*ARGS),
    "of accumulate": lambda fn: _gradients(accumulate(fn, 2, batch=BATCH))(*ARGS),
    "pipeline": lambda fn: pipeline(_gradients(fn), MESH, "dp", microbatches=2, batch=BATCH)(*ARGS),
    "shard": lambda fn: shard(_gradients(fn), MESH)(*_placed(P("tp"), DP, DP, DP)),
    "shard, mixed": lambda fn: shard(_gradients(fn), MESH)(*_placed(P(), DP, P(), P())),
    "shard of accumulate": lambda fn: shard(accumulate(_gradients(fn), 2, batch=BATCH), MESH)(
        *_placed(P(), DP, DP, DP)
    ),
    "accumulate of shard": lambda fn: accumulate(shard(_gradients(fn), MESH), 2, batch=BATCH)(
        *_placed(P(None, "tp"), DP, P(), DP)
    ),
    "jit": lambda fn: jit(_gradients(fn), backend="eager")(*ARGS),
}


@pytest.mark.sampled(5)
@pytest.mark.filterwarnings("ignore:.*along no value:torchard.IdleAxisWarning")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str, run: str) -> None:
    have = tree.map(lambda v: v.full() if hasattr(v, "full") else v, RUNS[run](FUNCTIONS[name]))
    torch.testing.assert_close(have, _gradients(FUNCTIONS[name])(*ARGS))


def test_bags_send_what_lookups_do() -> None:
    def sent(fn: Fn) -> list[tuple[str, tuple[int, ...]]]:
        plan = shard(_gradients(fn), MESH).lower(*_placed(P("tp"), DP, DP, DP))
        return [(c.kind, c.shape) for c in plan.collectives]

    lookup = sent(lambda t, x, y, ids: F.embedding(ids, t).sum(1) * x)
    assert sent(FUNCTIONS["a sum of bags"]) == lookup


@pytest.mark.parametrize("mode", ["max", "sum"])
def test_other_bags_keep_torch_kernel(mode: str) -> None:
    """Bags of any sizes, and maxima, whose gradients go to one of equal elements."""

    def fn(t: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, 2]) if mode == "sum" else None
        bags: torch.Tensor = F.embedding_bag(ids[0] if mode == "sum" else ids, t, offsets, mode=mode)
        return bags.sin().sum()

    found, want = jit(grad(fn), backend="eager")(TABLE, IDS), grad(fn)(TABLE, IDS)
    torch.testing.assert_close(found, want)
    kernel = "aten._embedding_bag"
    assert any(str(n.target).startswith(kernel) for n in trace(grad(fn))(TABLE, IDS).calls)
