"""Sums over ranks that are added are reduced once, wherever biases are added."""

from __future__ import annotations

from random import Random
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard import (
    Mesh,
    P,
    checkpoint,
    constrain,
    full,
    jit,
    name,
    place,
    policies,
    repeat,
    shard,
)
from torchard.testing import prove

WIDTH, HIDDEN, RANKS, BATCH, CONTEXT = 6, 8, 2, 4, 3
MESH = Mesh({"tp": RANKS}, virtual=True)
TERM = BATCH * CONTEXT * WIDTH
Params = dict[str, Any]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def columns(weight: torch.Tensor) -> P:
    return P(None, "tp") if weight.shape == (WIDTH, HIDDEN) else P()


def compare(have: Any, want: Any) -> None:
    for a, b in zip(optree.tree_leaves(have), optree.tree_leaves(want), strict=True):
        torch.testing.assert_close(full(a), b)


# -- any sum -----------------------------------------------------------------------------------------


def folded(rng: Random, terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum of some terms, added in any order."""
    terms = list(terms)
    while len(terms) > 1:
        one, other = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        terms.append(one + other)
    return terms[0]


@settings(max_examples=examples(10, 300))
@given(
    biased=st.lists(st.sampled_from(["bias", "flat bias"]), min_size=1, max_size=3),
    one=st.sampled_from(["bias", "flat", "batched"]),
    others=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sum_of_products_is_reduced_once(
    biased: list[str], one: str, others: int, seed: int
) -> None:
    kinds = [*biased, one]

    def fn(hidden: list[Any], weights: list[Any], biases: list[Any], rest: list[Any]) -> Any:
        terms = list(rest)
        for kind, h, w, b in zip(kinds, hidden, weights, biases, strict=True):
            h = h.view(-1, HIDDEN) if "flat" in kind else h
            product = F.linear(h, w, b) if "bias" in kind else h @ w.mT
            terms.append(product.view(BATCH, CONTEXT, WIDTH))
        return folded(Random(seed), terms).tanh()

    count = range(len(kinds))
    hidden = [numbers(BATCH, CONTEXT, HIDDEN) for _ in count]
    weights = [numbers(WIDTH, HIDDEN) for _ in count]
    biases = [numbers(WIDTH) for _ in count]
    rest = [numbers(BATCH, CONTEXT, WIDTH) for _ in range(others)]
    args = hidden, weights, biases, rest
    run = shard(fn, MESH, (P(None, None, "tp"), P(None, "tp"), P(), P()), P())
    plan = run.lower(*args)
    prove(plan)
    (only,) = plan.collectives
    assert (only.kind, only.bytes) == ("all_reduce", 8 * TERM), plan.collectives
    compare(run(*args), fn(*args))


def test_sums_that_something_else_reads_are_reduced_apart() -> None:
    def fn(h: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one, other = h @ w.mT, v @ w.mT
        return one + 1.0, (one + other).tanh()

    args = numbers(BATCH, HIDDEN), numbers(BATCH, HIDDEN), numbers(WIDTH, HIDDEN)
    run = shard(fn, MESH, (P(None, "tp"), P(None, "tp"), P(None, "tp")), P())
    prove(run.lower(*args))
    assert sum(c.bytes for c in run.lower(*args).collectives) == 2 * 8 * BATCH * WIDTH
    compare(run(*args), fn(*args))


def test_sums_that_something_else_reads_below_a_view_are_reduced_apart() -> None:
    """The last one would also sum the terms of the first, wherever it is read."""

    def fn(h: torch.Tensor, v: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[Any, Any]:
        one, last = h @ w.mT + b, v @ w.mT
        return one.view(2, -1, WIDTH) + last.view(2, -1, WIDTH), last.tanh()

    args = numbers(BATCH, HIDDEN), numbers(BATCH, HIDDEN), numbers(WIDTH, HIDDEN), numbers(WIDTH)
    run = shard(fn, MESH, (P(None, "tp"), P(None, "tp"), P(None, "tp"), P()), P())
    prove(run.lower(*args))
    assert sum(c.bytes for c in run.lower(*args).collectives) == 2 * 8 * BATCH * WIDTH
    compare(run(*args), fn(*args))


def test_sums_in_other_dtypes_are_reduced_apart() -> None:
    """A sum in float32 is not one in float64."""

    def fn(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (h @ w.mT + b) + (h.float() @ w.float().mT + b.float()).double()

    args = numbers(BATCH, HIDDEN), numbers(WIDTH, HIDDEN), numbers(WIDTH)
    run = shard(fn, MESH, (P(None, "tp"), P(None, "tp"), P()), P())
    plan = run.lower(*args)
    assert sorted(str(c.dtype) for c in plan.collectives) == ["torch.float32", "torch.float64"]
    prove(plan)
    torch.testing.assert_close(run(*args), fn(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.bfloat16, torch.float64], ids=str)
def test_what_is_added_between_is_in_the_dtype_of_the_sum(dtype: torch.dtype) -> None:
    """Small integers would wrap, masks be united, and bfloat16 be rounded; a 0-d value would widen."""

    def fn(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        total = ((h @ w.mT + b) + c) + (h + 1) @ w.mT
        return total.view(-1) @ torch.ones(total.numel(), 1)

    shape = () if dtype == torch.float64 else (WIDTH,)
    b, c = torch.full(shape, 121).to(dtype), torch.full(shape, 71).to(dtype)
    h, w = torch.arange(BATCH * HIDDEN).view(BATCH, -1) % 5.0, torch.ones(WIDTH, HIDDEN)
    run = shard(fn, MESH, (P(None, "tp"), P(None, "tp"), P(), P()), P())
    plan = run.lower(h, w, b, c)
    prove(plan)
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
    have, want = full(run(h, w, b, c)), fn(h, w, b, c)
    assert have.dtype == want.dtype
    assert torch.equal(have, want)


# -- parallel blocks ---------------------------------------------------------------------------------


def block(p: Params, x: torch.Tensor) -> torch.Tensor:
    """As in GPT-J: attention's branch and the MLP's read one norm, and both have biases."""
    h = F.layer_norm(x, (WIDTH,), p["scale"], p["shift"])
    one = F.linear(torch.sin(F.linear(h, p["q"], p["q_bias"])), p["o"], p["o_bias"])
    other = F.linear(torch.tanh(F.linear(h, p["up"], p["up_bias"])), p["down"], p["down_bias"])
    return x + name(one, "one") + name(other, "other")


SHAPES = {
    **dict.fromkeys(("scale", "shift", "o_bias", "down_bias"), (WIDTH,)),
    **dict.fromkeys(("q", "up"), (HIDDEN, WIDTH)),
    **dict.fromkeys(("q_bias", "up_bias"), (HIDDEN,)),
    **dict.fromkeys(("o", "down"), (WIDTH, HIDDEN)),
}
SPECS = {
    key: P("tp") if shape[0] == HIDDEN else P(None, "tp") if len(shape) == 2 else P()
    for key, shape in SHAPES.items()
}
LAYERS = 3


def specs_of(stacked: bool) -> Any:
    if stacked:
        return {key: P(None, *spec) for key, spec in SPECS.items()}
    return [SPECS] * LAYERS


def parameters(stacked: bool) -> Any:
    rows = {key: numbers(LAYERS, *shape) for key, shape in SHAPES.items()}
    each = [{key: row[i] for key, row in rows.items()} for i in range(LAYERS)]
    return rows if stacked else each


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    if isinstance(params, dict):
        return repeat(block, params, x).square().mean()
    for p in params:
        x = block(p, x)
    return x.square().mean()


def sums(plan: Any) -> list[tuple[str, int]]:
    return [(c.phase, c.bytes) for c in plan.collectives for _ in range(c.times) if c.op == "sum"]


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_a_parallel_block_has_one_sum_in_each_pass(stacked: bool) -> None:
    params, specs, x = parameters(stacked), specs_of(stacked), numbers(BATCH, CONTEXT, WIDTH)
    args = place(params, MESH, specs), x
    run = shard(torch.func.grad(loss), MESH, out_specs=specs)
    plan = run.lower(*args)
    assert sums(plan).count(("forward", 8 * TERM)) == LAYERS, plan.collectives
    assert sums(plan).count(("backward", 8 * TERM)) == LAYERS, plan.collectives
    assert len(sums(plan)) == 2 * LAYERS
    prove(plan)
    want = torch.func.grad(loss)(params, x)
    compare(run(*args), want)
    inner = shard(loss, MESH)
    compare(torch.func.grad(inner)(*args), want)
    compare(torch.func.grad(jit(inner, backend="eager"))(*args), want)


def test_the_terms_of_a_sequence_split_block_are_scattered_once() -> None:
    """Megatron's sequence parallelism: between blocks, positions are split."""

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = constrain(block(p, x), P(None, "tp"))
        return x

    params, x = parameters(False), numbers(BATCH, 4, WIDTH)
    run = shard(fn, MESH, (specs_of(False), P(None, "tp")), P(None, "tp"))
    plan = run.lower(params, x)
    found = [c.kind for c in plan.collectives]
    assert found.count("psum_scatter") == LAYERS, plan.collectives
    assert set(found) == {"psum_scatter", "all_gather"}
    prove(plan)
    compare(run(params, x), fn(params, x))


@pytest.mark.parametrize("apart", [False, True], ids=["one segment", "two segments"])
def test_recomputed_blocks(apart: bool) -> None:
    """Also where the terms are in segments of their own; a label that a policy names stays a value."""
    def branch(p: Params, h: torch.Tensor, last: str, act: Any) -> torch.Tensor:
        first = {"o": "q", "down": "up"}[last]
        hidden = act(F.linear(h, p[first], p[f"{first}_bias"]))
        return name(F.linear(hidden, p[last], p[f"{last}_bias"]), "term")

    def fn(params: Any, x: torch.Tensor, how: Any) -> torch.Tensor:
        inner = (lambda f: checkpoint(f, policy=how)) if apart else lambda f: f
        for p in params:

            def one(p: Params, h: torch.Tensor) -> torch.Tensor:
                return branch(p, h, "o", torch.sin)

            def other(p: Params, h: torch.Tensor) -> torch.Tensor:
                return branch(p, h, "down", torch.tanh)

            def whole(p: Params, x: torch.Tensor) -> torch.Tensor:
                h = F.layer_norm(x, (WIDTH,), p["scale"], p["shift"])
                return x + inner(one)(p, h) + inner(other)(p, h)

            x = whole(p, x) if apart else checkpoint(whole, policy=how)(p, x)
        return x.square().mean()

    params, x = parameters(False), numbers(BATCH, CONTEXT, WIDTH)
    args = place(params, MESH, specs_of(False)), x
    counts = []
    for how in (policies.save_nothing, policies.save_names("term")):
        gradient = torch.func.grad(lambda params, x, how=how: fn(params, x, how))
        run = shard(gradient, MESH, out_specs=specs_of(False))
        plan = run.lower(*args)
        counts.append(sums(plan).count(("forward", 8 * TERM)))
        prove(plan)
        compare(run(*args), gradient(params, x))
    assert counts == [LAYERS, 2 * LAYERS]
