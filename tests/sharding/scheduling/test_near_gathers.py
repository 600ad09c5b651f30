"""The keys and the values of an attention over split positions are gathered by one call."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F

from torchard import Mesh, P, full, jit, place, repeat, shard
from torchard.testing import prove

BATCH, CONTEXT, WIDTH, HEADS, RANKS, LAYERS = 2, 8, 16, 4, 2, 3
MESH = Mesh({"sp": RANKS}, virtual=True)
Params = dict[str, torch.Tensor]


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The values are needed after the softmax only."""
    return torch.softmax(q @ k.mT, -1) @ v


ATTENTIONS = {"fused": fused, "plain": plain}


def model(attention: Any) -> Any:
    def block(p: Params, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (F.linear(x, p[n]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for n in "qkv")
        return x + F.linear(attention(q, k, v).transpose(1, 2).flatten(-2), p["o"])

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        if isinstance(params, dict):
            return repeat(block, params, x)
        for p in params:
            x = block(p, x)
        return x

    return fn


def parameters(stacked: bool) -> Any:
    rows = {n: torch.randn(LAYERS, WIDTH, WIDTH, dtype=torch.float64) / 4 for n in "qkvo"}
    return rows if stacked else [{n: row[i] for n, row in rows.items()} for i in range(LAYERS)]


def compare(have: Any, want: Any) -> None:
    for a, b in zip(optree.tree_leaves(have), optree.tree_leaves(want), strict=True):
        torch.testing.assert_close(full(a), b)


@pytest.mark.parametrize("context", [CONTEXT, CONTEXT - 1], ids=["even", "uneven"])
@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_one_gather_for_each_attention(name: str, stacked: bool, context: int) -> None:
    fn, params = model(ATTENTIONS[name]), parameters(stacked)
    x = torch.randn(BATCH, context, WIDTH, dtype=torch.float64)
    args = params, place(x, MESH, P(None, "sp"))
    run = shard(fn, MESH, out_specs=P(None, "sp"))
    plan = run.lower(*args)
    prove(plan)
    gathers = [c for c in plan.collectives for _ in range(c.times) if c.kind == "all_gather"]
    shard_bytes = 8 * BATCH * -(-context // RANKS) * WIDTH
    assert [(c.bytes, c.note) for c in gathers] == [(2 * shard_bytes, "2 merged")] * LAYERS
    compare(run(*args), fn(params, x))


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_gradients(name: str, stacked: bool) -> None:
    fn, params = model(ATTENTIONS[name]), parameters(stacked)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fn(params, x).square().mean()

    x = torch.randn(BATCH, CONTEXT, WIDTH, dtype=torch.float64)
    args, want = (params, place(x, MESH, P(None, "sp"))), torch.func.grad(loss)(params, x)
    run = shard(torch.func.grad(loss), MESH, out_specs=P())
    plan = run.lower(*args)
    merged = [c for c in plan.collectives for _ in range(c.times) if c.note == "2 merged"]
    assert [c.kind for c in merged].count("all_gather") == LAYERS, plan.collectives
    prove(plan)
    compare(run(*args), want)
    inner = shard(loss, MESH)
    compare(torch.func.grad(inner)(*args), want)
    compare(torch.func.grad(jit(inner, backend="eager"))(*args), want)


def test_what_is_computed_later_or_used_far_away_waits_for_itself() -> None:
    """Gathers that depend on one another; one is used beside the last, and not held before."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        z = w @ (w @ (w @ x).sin()).sin()
        return z + w @ y

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    run = shard(fn, MESH, (P("sp"), P("sp")), P("sp"))
    plan = run.lower(x, w)
    assert [c.note for c in plan.collectives] == ["", "", "2 merged"], plan.collectives
    prove(plan)
    torch.testing.assert_close(full(run(x, w)), fn(x, w), rtol=1e-4, atol=1e-4)


def test_results_are_gathered_one_by_one() -> None:
    """Together they would be in memory twice."""
    mesh = Mesh({"sp": 2}, virtual=True)
    run = shard(lambda x, y: (x.sin(), y.cos().t()), mesh, in_specs=P("sp"), out_specs=P())
    assert len(run.lower(torch.randn(4, 3), torch.randn(6, 3)).collectives) == 2
