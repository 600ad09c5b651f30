"""policies.budget: the peak is never above the budget, and nothing cheaper fits."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import train_gpt
from effort import examples
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch.func import grad

from torchard import (
    CheckpointError,
    Mesh,
    P,
    checkpoint,
    jit,
    place,
    policies,
    random,
    scope,
    shard,
    trace,
)
from torchard.functional.costs.flops import flops
from torchard.functional.derivatives.autodiff import joint
from torchard.functional.programs.program import Program
from torchard.functional.remat import budget
from torchard.functional.remat.budget import Point, envelope, tried
from torchard.functional.remat.budget_problem import problem_of
from torchard.functional.remat.remat_ilp import solve
from torchard.functional.remat.segments import mark

TENTHS = [k / 10 for k in range(10, -1, -1)]
SOME = TENTHS[:: examples(ci=2, explore=1)]


def joint_of(fn: Callable[..., Any], *args: Any) -> Program:
    """The joint program of fn, all of it in a segment with a budget."""
    program = joint(trace(fn)(*args), [True] * len(args))
    return mark(program, policies.budget(fraction=0.5), None)


# -- against exhaustive search ----------------------------------------------------------------------

# A step of a random program: what it does to the last value and to one of those before.
STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "tanh": lambda x, y: torch.tanh(x),
    "exp": lambda x, y: torch.exp(0.1 * x),
    "mul": lambda x, y: x * y,
    "mm": lambda x, y: x @ y.mT @ y,
    "widen": lambda x, y: torch.cat([x, y], 1).sin()[:, : x.shape[1]],
    "mix": lambda x, y: (x + y).sigmoid(),
}


def run(steps: list[tuple[str, int]], x: torch.Tensor) -> torch.Tensor:
    values = [x.expand(32, 4)]
    for name, i in steps:
        values.append(STEPS[name](values[-1], values[i % len(values)]))
    return values[-1].sum()


def exhaustively(program: Program) -> list[Point]:
    """Every choice there is."""
    operations, _ = problem_of(program)
    choices = itertools.product((False, True), repeat=len(operations))
    return [
        tried(program, budget._results(itertools.compress(operations, kept))) for kept in choices
    ]


steps = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9)), min_size=3, max_size=6
)


@settings(max_examples=12)
@given(steps)
def test_nothing_cheaper_fits(steps: list[tuple[str, int]]) -> None:
    program = joint_of(functools.partial(run, steps), torch.zeros(4))
    assume(len(problem_of(program)[0]) <= 7)
    every, found = exhaustively(program), envelope(program)
    event(f"{len(found)} points")
    least, most = min(p.peak for p in every), found[-1].peak
    assert found[0].peak == least
    for tenth in TENTHS:
        bound = least + tenth * (most - least)
        best = min(p.flops for p in every if p.peak <= bound)
        assert min(p.flops for p in found if p.peak <= bound) <= 1.05 * best, (tenth, steps)


def test_no_solution_comes_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds do not fall byte by byte."""
    steps, solved = [("mm", 8), ("exp", 7), ("exp", 1), ("mm", 8)], []

    def counted(problem: Any, bound: float) -> Any:
        solved.append(bound)
        return solve(problem, bound)

    monkeypatch.setattr(budget, "solve", counted)
    monkeypatch.setattr(budget, "_envelopes", {})
    envelope(joint_of(functools.partial(run, steps), torch.zeros(4)))
    assert len(solved) < 64


# -- what is measured -------------------------------------------------------------------------------

SIZE = train_gpt.Size(context=32, width=32, heads=2, layers=2)
PARAMS = train_gpt.init(SIZE, random.key(0))
BATCH = torch.arange(4 * 33).reshape(4, 33) % 256
gpt = functools.partial(train_gpt.loss, SIZE)


def step_of(loss: Callable[..., Any]) -> Any:
    return jit(grad(loss), backend="eager")


def measured(loss: Callable[..., Any]) -> tuple[int, Any]:
    """The bytes that one step holds at most, and its gradients."""
    run = step_of(loss)
    run(PARAMS, BATCH)
    with LiveBytes([*torch.utils._pytree.tree_leaves(PARAMS), BATCH]) as count:
        slopes = run(PARAMS, BATCH)
    return count.peak(), slopes


def test_ten_budgets() -> None:
    """From what saving everything takes down to the least: never above, never rising, always exact."""
    everything, want = measured(gpt)
    found = []
    for tenth in SOME:
        peak, slopes = measured(checkpoint(gpt, policy=policies.budget(fraction=tenth)))
        found.append(peak)
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, (slopes, want)), strict=True):
            assert torch.equal(a, b)
    assert found[0] == everything
    assert found == sorted(found, reverse=True)
    assert all(
        peak <= found[-1] + tenth * (everything - found[-1])
        for peak, tenth in zip(found, SOME, strict=True)
    )
    assert found[-1] < 0.6 * everything and len(set(found)) > 0.6 * len(SOME)


@pytest.mark.parametrize("by_hand", [policies.save_nothing, policies.save_dots], ids=str)
def test_no_worse_than_a_policy_by_hand(by_hand: policies.Policy) -> None:
    """What the textbook's schedule takes and makes again is enough, each to two percent."""
    program = checkpoint(gpt, policy=by_hand, where="block/*").lower_joint(PARAMS, BATCH)
    bound = policies.budget(bytes=int(1.02 * program.peak))
    found = checkpoint(gpt, policy=bound).lower_joint(PARAMS, BATCH)
    assert found.peak <= 1.02 * program.peak
    assert again(found) <= 1.02 * again(program)


def again(program: Program) -> int:
    return sum(flops(node) for node in program.calls if node.meta.get("recompute"))


def test_a_budget_of_a_part() -> None:
    """Only what the scopes make is made again, and peaks are of the whole."""
    whole = checkpoint(gpt, policy=policies.budget(fraction=0.3), where="block/0")
    program = whole.lower_joint(PARAMS, BATCH)
    scopes = {n.meta.get("scope") for n in program.calls if n.meta.get("recompute")}
    assert scopes == {"block/0"}
    assert program.peak < step_of(gpt).lower(PARAMS, BATCH).peak


def chain(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for i, w in enumerate(weights):
        with scope(f"block/{i}"):
            x = torch.tanh(x @ w).sin()
    return x.square().mean()


@pytest.mark.parametrize("form", ["checkpoint inside", "checkpoint outside", "step"])
def test_budgets_of_one_rank(form: str) -> None:
    """Over a mesh it is the bytes of one rank that count, when all collectives have been placed."""
    mesh = Mesh({"dp": 3}, virtual=True)
    weights = place([torch.randn(16, 16) for _ in range(6)], mesh, P("dp"))
    x = place(torch.randn(97, 16), mesh, P("dp"))

    def lowered(policy: policies.Policy) -> Program:
        if form == "step":
            return shard(grad(checkpoint(chain, policy=policy)), mesh).lower(weights, x)
        if form == "checkpoint inside":
            return shard(checkpoint(chain, policy=policy), mesh).lower_joint(weights, x, argnums=0)
        return checkpoint(shard(chain, mesh), policy=policy).lower_joint(weights, x, argnums=0)

    plain, least = lowered(policies.save_everything), lowered(policies.budget(fraction=0.0))
    assert least.peak < 0.9 * plain.peak
    peaks = []
    for tenth in TENTHS[::2]:
        bound = int(least.peak + tenth * (plain.peak - least.peak))
        peaks.append(lowered(policies.budget(bytes=bound)).peak)
        assert peaks[-1] <= bound
    assert peaks == sorted(peaks, reverse=True)
    with pytest.raises(CheckpointError, match=f"reached is {least.peak:,} bytes"):
        lowered(policies.budget(bytes=least.peak - 1))


# -- errors -----------------------------------------------------------------------------------------


def test_too_small_a_budget_names_the_least() -> None:
    with pytest.raises(CheckpointError, match=r"least peak that can be reached is [\d,]+ bytes"):
        checkpoint(gpt, policy=policies.budget(bytes=1000)).lower_joint(PARAMS, BATCH)


def test_one_budget_at_a_time() -> None:
    def two(x: torch.Tensor) -> torch.Tensor:
        for part in (0.5, 0.6):
            x = checkpoint(torch.sin, policy=policies.budget(fraction=part))(x)
        return x.sum()

    with pytest.raises(CheckpointError, match="2 budgets"):
        jit(grad(two), backend="eager")(torch.ones(3))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "either fraction or bytes"),
        ({"fraction": 0.5, "bytes": 1}, "either fraction or bytes"),
        ({"fraction": 2.0}, "0 is the least"),
    ],
)
def test_budgets_that_make_no_sense(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        policies.budget(**given)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ModuleNotFoundError, match=r"torchard\[budget\]"):
        checkpoint(gpt, policy=policies.budget(fraction=0.5)).lower_joint(PARAMS, BATCH[:3])
