"""First calls do nothing twice: counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from microbatched import BATCH
from pipelined import model

from torchard import (
    Mesh,
    P,
    ShapeDtype,
    jit,
    nn,
    optim,
    pipeline,
    place,
    shard,
    stage_specs,
)
from torchard.functional.engine import transformed
from torchard.sharding.decompositions import decompose
from torchard.sharding.lowering.lower import Lowering
from torchard.sharding.microbatches.turns import in_turn
from torchard.sharding.planning.propagation.sweep import Sweep

LOWERED, VISITED = "lowered", "visited"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function that takes time was called."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, what: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    count(transformed, "trace_call", "traces")
    count(decompose, "record", "decompositions")
    count(Lowering, "_operation", LOWERED)
    count(Lowering, "run", "graphs")
    count(Sweep, "_visit", VISITED)
    return counts


def train_step(count: int) -> tuple[Any, tuple[Any, ...]]:
    case = model("gpt", 8)
    params, *batch = case.args
    optimizer = optim.adamw(1e-2)

    def train(params: Any, state: Any, *batch: torch.Tensor) -> Any:
        gradients, loss = torch.func.grad_and_value(case.loss)(params, *batch)
        return *optimizer.update(gradients, state, params), loss

    how = {"stages": case.layers, "microbatches": count, "batch": (None, None, *BATCH[1:])}
    step = pipeline(train, Mesh({"pp": 2}, virtual=True), "pp", **how)
    return step, (params, optimizer.init(params), *batch)


def test_a_pipeline_is_traced_once(counted: Counter[str]) -> None:
    step, (params, state, *batch) = train_step(4)
    specs = stage_specs(step, params, state, *batch)
    assert counted == {"traces": 1}  # nothing is sliced, planned or lowered for the homes of parameters
    optimizer = optim.adamw(1e-2)
    placed = place(params, Mesh({"pp": 2}, virtual=True), specs)
    step(placed, optimizer.init(placed), *batch)
    assert counted["traces"] == step.traces == 1
    assert counted["graphs"] == 1


def test_a_trace_is_not_shared_once_the_function_has_changed() -> None:
    factor = [2.0]
    mesh = Mesh({"dp": 2}, virtual=True)
    fn = shard(lambda x: factor[0] * x, mesh)
    x = torch.ones(4)
    fn.lower(x)
    factor[0] = 3.0
    assert fn(place(x, mesh, P("dp"))).full().tolist() == [3.0] * 4
    assert fn.traces == 2


def test_a_trace_is_shared_by_values_with_other_placements() -> None:
    mesh = Mesh({"dp": 2}, virtual=True)
    buffer = torch.arange(4.0)  # closed over
    fn = shard(lambda x: x + buffer, mesh)
    x = torch.ones(4)
    fn.lower(ShapeDtype((4,)))
    have = fn(place(x, mesh, P("dp")))
    assert have.full().equal(x + buffer) and have.spec == P("dp")
    buffer += 1
    for spec in (P("dp"), P()):
        assert fn(place(x, mesh, spec)).full().equal(x + buffer)
    assert fn.traces == 1


def test_one_microbatch_is_lowered_for_all(
    counted: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def in_turns(*args: Any) -> Any:
        before = counted[LOWERED]
        result = in_turn(*args)
        found.append(counted[LOWERED] - before)
        return result

    monkeypatch.setattr(sys.modules["torchard.sharding.accumulate"], "in_turn", in_turns)
    for count in (2, 4):
        step, args = train_step(count)
        step.lower(*args)
    few, more = found
    assert few <= more < 1.01 * few  # what depends on which rows a microbatch has is lowered for each


def test_what_nothing_splits_is_planned_in_one_sweep(counted: Counter[str]) -> None:
    step, args = train_step(2)
    lowered = step.lower(*args)
    assert counted[VISITED] <= len(lowered.calls) + 10  # views that are used twice are merged


def test_decompositions_of_equal_layers_are_traced_once(counted: Counter[str]) -> None:
    mesh = Mesh({"tp": 2}, virtual=True)

    def loss(w: torch.Tensor, x: torch.Tensor, layers: int) -> torch.Tensor:
        for _ in range(layers):
            x = torch.nn.functional.layer_norm(x, (8,), w)
        return nn.linear(x, w[None]).sum()

    run = shard(torch.func.grad(loss), mesh, in_specs=(P("tp"), P(None, "tp"), None))
    found = []
    for layers in (2, 4):
        counted.clear()
        run.lower(ShapeDtype((8,)), ShapeDtype((4, 8)), layers)
        found.append(counted["decompositions"])
    assert found[0] == found[1] > 0


def test_a_program_in_planned_memory_is_lowered_once(counted: Counter[str]) -> None:
    mesh = Mesh({"dp": 2}, virtual=True)
    fn = jit(shard(torch.sin, mesh, in_specs=P("dp")), backend="eager", memory="planned")
    x = torch.ones(4)
    assert fn(x).full().equal(torch.sin(x))
    assert counted["graphs"] == 1
