"""Budgets of programs with loops: what is measured is what they say, and hardly dearer than unrolled."""

from __future__ import annotations

import functools
import gc
from random import Random
from typing import Any

import optree
import pytest
import torch
import train_gpt
from _live import LiveBytes
from effort import cases, examples
from random_loops import random_layers, random_loop
from torch.func import grad

from torchard import (
    Mesh,
    MeshTensor,
    P,
    UnexpectedTracerError,
    checkpoint,
    jit,
    name,
    policies,
    random,
    repeat,
    shard,
)
from torchard.functional.costs.flops import flops
from torchard.functional.loops import equal_layers as limits
from torchard.functional.programs.loops import times
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import LOOP, RECOMPUTE
from torchard.functional.programs.unrolled import has_loops

COUNT = examples(ci=10, explore=2000)
LAYERS = 4
SIZE = train_gpt.Size(context=32, width=32, heads=2, layers=LAYERS)
PARAMS = train_gpt.init(SIZE, random.key(0))
BATCH = torch.arange(4 * 33).reshape(4, 33) % 256
gpt = functools.partial(train_gpt.loss, SIZE)


@pytest.fixture(autouse=True)
def few_operations_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are rolled, too."""
    monkeypatch.setattr(limits, "MIN_SAVED_PER_LOOP", 1)
    monkeypatch.setattr(limits, "MIN_SAVED", 1)


def recomputed(program: Program) -> int:
    return sum(flops(node) * times(node) for node in program.calls if RECOMPUTE.get(node))


def measured(run: Any, args: tuple[Any, ...]) -> tuple[int, Any]:
    """The bytes that a call holds at most, and its results."""
    run(*args)
    gc.collect()
    with LiveBytes(torch.utils._pytree.tree_leaves(args)) as count:
        results = run(*args)
    return count.peak(), results


def spans(program: Program) -> set[tuple[int, int]]:
    """Of each loop, its first row and how many it has."""
    return {(LOOP.of(n).first, LOOP.of(n).count) for n in program.calls if LOOP.on(n)}


def test_budgets_from_everything_to_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never above the bound, exact, falling; some keep less of the first layers than of the others."""

    def step_of(**bound: Any) -> Any:
        loss = checkpoint(gpt, policy=policies.budget(**bound))
        return jit(lambda p, b: grad(loss)(p, b), backend="eager")

    everything = step_of(fraction=1.0).lower(PARAMS, BATCH).peak
    least = step_of(fraction=0.0).lower(PARAMS, BATCH).peak
    want = grad(gpt)(PARAMS, BATCH)
    found, parts = [], set()
    for tenth in (0, 4, 10):
        bound = least + tenth * (everything - least) // 10
        step = step_of(bytes=bound)
        program = step.lower(PARAMS, BATCH)
        peak, slopes = measured(step, (PARAMS, BATCH))
        assert has_loops(program)
        assert peak == program.peak <= bound
        torch.testing.assert_close(slopes, want, rtol=1e-4, atol=1e-6)
        found.append((recomputed(program), bound))
        parts.add(len(spans(program)))
    costs = [cost for cost, _ in found]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 0 < costs[0]
    assert parts == {1, 2}
    monkeypatch.setattr(limits, "MIN_SAVED", 10**9)
    cost, bound = found[1]
    unrolled = step_of(bytes=bound).lower(PARAMS, BATCH)
    assert not has_loops(unrolled)
    assert cost <= 1.15 * recomputed(unrolled)


def test_a_bound_that_only_single_layers_can_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no choice that is the same for all layers fits is tried layer by layer; then it is refused."""

    def chain(ws: Any, x: torch.Tensor) -> torch.Tensor:
        for w in ws:  # a layer hands on what is wide, and could be computed of what is narrow
            x = torch.cosh(torch.tanh(x @ w) @ w.T)
        return x.sum()

    ws, x = [torch.ones(64, 2) for _ in range(8)], torch.ones(64, 64)

    def peak(**bound: Any) -> tuple[int, bool]:
        loss = checkpoint(chain, policy=policies.budget(**bound))
        program = jit(lambda ws, x: grad(loss)(ws, x), backend="eager").lower(ws, x)
        return program.peak, has_loops(program)

    least, rolled = peak(fraction=0.0)
    assert rolled
    with monkeypatch.context() as patch:
        patch.setattr(limits, "MIN_SAVED", 10**9)
        lower, rolled = peak(fraction=0.0)
        assert not rolled
    assert lower < least
    assert peak(bytes=least) == (least, True)
    assert peak(bytes=lower) == (lower, False)


@pytest.mark.parametrize("bound", cases([0.2], [0.6]))
def test_on_a_mesh(bound: float) -> None:
    mesh = Mesh({"dp": 2}, virtual=True)
    loss = checkpoint(gpt, policy=policies.budget(fraction=bound))
    step = shard(lambda p, b: grad(loss)(p, b), mesh, (P("dp"), P("dp")), P("dp"))
    program = step.lower(PARAMS, BATCH)
    assert has_loops(program)
    assert recomputed(program)
    found = optree.tree_leaves(step(PARAMS, BATCH), is_leaf=lambda x: isinstance(x, MeshTensor))
    for have, want in zip(found, optree.tree_leaves(grad(gpt)(PARAMS, BATCH)), strict=True):
        torch.testing.assert_close(have.full(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # batching rules torch lacks
@pytest.mark.parametrize("first", range(0, COUNT, 5))
def test_random_loops(first: int) -> None:
    """Any budget that can be met: the same gradients, and no more memory."""
    rolled = 0
    for seed in range(first, first + 5):
        rng = Random(seed)
        source = rng.choice([random_loop, random_layers])
        _, fn, inputs = source(rng, Mesh({"x": 2}, virtual=True))
        every = tuple(range(len(inputs)))

        def loss(*xs: torch.Tensor, fn: Any = fn) -> torch.Tensor:
            return torch.stack([out.sin().sum() for out in fn(*xs)]).sum()

        kept = checkpoint(loss, policy=policies.budget(fraction=rng.choice([0.0, 0.3, 0.7, 1.0])))
        step = jit(lambda *xs, kept=kept, every=every: grad(kept, every)(*xs), backend="eager")
        try:
            program = step.lower(*inputs)
        except UnexpectedTracerError:  # a block with no_grad that closes over a tracer is refused
            continue
        rolled += has_loops(program)
        peak, slopes = measured(step, inputs)
        if not program.constants:
            assert peak == program.peak, seed
        torch.testing.assert_close(slopes, grad(loss, every)(*inputs), rtol=1e-10, atol=1e-12)
    assert rolled


@pytest.mark.parametrize("count", cases([2, 6], [4]))
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_constrained_values_of_a_loop_on_a_mesh(count: int, fraction: float) -> None:
    """A product of two awaited values, of which one is read in its iteration, is awaited there too."""

    def f(ws: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return repeat(lambda w, x: x + name(torch.tanh(x @ w), "act"), ws, x)

    ws, x = torch.randn(count, 8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    small = checkpoint(f, policy=policies.budget(fraction=fraction))
    gradient = torch.func.grad(lambda w, x: (small(w, x) ** 2).mean())
    mesh, within = Mesh({"d": 2}, virtual=True), {"block/*/act": P(None, "d")}
    run = shard(gradient, mesh, in_specs=(None, P("d")), constrain_at=within)
    want = torch.func.grad(lambda w, x: (f(w, x) ** 2).mean())(ws, x)
    torch.testing.assert_close(run(ws, x).full(), want)
