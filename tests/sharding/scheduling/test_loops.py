"""A step whose results are its next arguments is planned once, whatever is placed how."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import optree
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard import Mesh, MeshTensor, P, full, optim, place, repeat, shard
from torchard.sharding.testing import random_spec

MESHES = [Mesh(axes, virtual=True) for axes in ({"dp": 2}, {"dp": 2, "tp": 2})]
SHAPES = {"w1": (6, 4), "b1": (6,), "w2": (4, 6), "b2": (4,), "scale": ()}
Params = dict[str, Any]


def _loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ params["w1"].T + params["b1"])
    return (params["scale"] * (hidden @ params["w2"].T + params["b2"])).square().mean()


def _sgd(params: Params, state: Any, x: torch.Tensor) -> tuple[Params, Any, torch.Tensor]:
    slopes, value = torch.func.grad_and_value(_loss)(params, x)
    return {k: params[k] - 0.1 * slopes[k] for k in params}, state, value


def _frozen(params: Params, state: Any, x: torch.Tensor) -> tuple[Params, Any, torch.Tensor]:
    """Some parameters are returned as they came."""
    new, state, value = _sgd(params, state, x)
    return {**new, "b1": params["b1"], "w2": params["w2"]}, state, value


def _average(params: Params, state: Any, x: torch.Tensor) -> tuple[Params, Any, torch.Tensor]:
    """The state is a moving average."""
    new, _, value = _sgd(params, state, x)
    return new, {k: 0.9 * state[k] + 0.1 * new[k] for k in state}, value


def _optimised(optimizer: optim.Optimizer) -> Callable[..., Any]:
    def step(params: Params, state: Any, x: torch.Tensor) -> tuple[Params, Any, torch.Tensor]:
        slopes, value = torch.func.grad_and_value(_loss)(params, x)
        return *optimizer.update(slopes, state, params), value

    return step


ADAMW, MOMENTUM = optim.adamw(1e-2, weight_decay=0.1), optim.sgd(0.1, momentum=0.9)
STEPS: dict[str, tuple[Callable[..., Any], Callable[[Params], Any]]] = {
    "sgd": (_sgd, lambda params: None),
    "frozen": (_frozen, lambda params: None),
    "average": (_average, dict),
    "momentum": (_optimised(MOMENTUM), MOMENTUM.init),
    "adamw": (_optimised(ADAMW), ADAMW.init),
}


@settings(max_examples=examples(8, 200))
@given(seed=st.integers(0, 2**32 - 1), told=st.booleans())
@pytest.mark.parametrize("name", STEPS)
def test_a_step_that_is_called_with_its_results_is_planned_once(
    name: str, seed: int, told: bool
) -> None:
    rng = Random(seed)
    mesh = rng.choice(MESHES)
    specs = {k: P() if rng.random() < 0.4 else random_spec(rng, s, mesh) for k, s in SHAPES.items()}
    plain = {k: torch.randn(s, dtype=torch.float64) for k, s in SHAPES.items()}
    # A number is whole anyway; what is given no place has none to keep.
    placed = {k: v if v.ndim == 0 else place(v, mesh, specs[k]) for k, v in plain.items()}
    x = torch.randn(4, 4, dtype=torch.float64)
    step, init = STEPS[name]
    params, state = placed, init(placed)
    want, reference = plain, init(plain)
    run = shard(step, mesh, out_specs=(specs, None, P()) if told else None)
    for _ in range(3):
        params, state, value = run(params, state, place(x, mesh, P("dp")))
        want, reference, expected = step(want, reference, x)
        torch.testing.assert_close(value, expected)
    assert run._traces == 1
    for k, v in params.items():
        assert isinstance(v, MeshTensor) == (v.ndim > 0), k
        torch.testing.assert_close(v.full() if v.ndim else v, want[k])
    is_leaf = lambda value: isinstance(value, MeshTensor)  # noqa: E731
    for have, known in zip(
        optree.tree_leaves(state, is_leaf, namespace="torchard"),
        optree.tree_leaves(reference, namespace="torchard"),
        strict=True,
    ):
        torch.testing.assert_close(have.full() if is_leaf(have) else have, known)


def test_an_update_that_a_loop_reads_stays_before_it() -> None:
    """Though nothing reads the carry that the loop hands on."""

    def step(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = w.clone()
        new = y.clone()
        rows = torch.stack([new, new + 1, new * 2])
        carry, _ = repeat(lambda row, c: (c[1] % 7, row % 7), rows, (y, y * 2))
        return new, carry.sum()

    w, mesh = torch.arange(4.0), Mesh({"dp": 2}, virtual=True)
    shard(step, mesh).lower(w).graph.lint()
    for have, want in zip(shard(step, mesh)(w), step(w), strict=True):
        assert torch.equal(full(have), want)
