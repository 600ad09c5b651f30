"""Compiled pipelines: one compilation for each distinct task, however many microbatches there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from effort import cases
from microbatched import BATCH
from pipelined import model, whole

from torchard import Mesh, checkpoint, jit, nn, pipeline, random, scope
from torchard.functional import torch_internals as internals
from torchard.functional.compiling.regions import Region, by_regions
from torchard.sharding.pipelining.schedules import SCHEDULES


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that a compiler was given."""
    found: list[Any] = []
    compile_graph = internals.compile_graph

    def counted(module: Any, *args: Any) -> Any:
        found.append(module)
        return compile_graph(module, *args)

    monkeypatch.setattr(internals, "compile_graph", counted)
    return found


def step_of(loss: Any, microbatches: int, axes: dict[str, int], schedule: str = "1f1b") -> Any:
    mesh = Mesh({"pp": 2, **axes}, virtual=True)
    options = {"stages": "layer/*", "microbatches": microbatches, "schedule": schedule}
    step = pipeline(torch.func.grad_and_value(loss), mesh, "pp", batch=BATCH, **options)
    return jit(step, backend="aot_eager")


@pytest.mark.sampled(7)
@pytest.mark.filterwarnings("ignore::torchard.IdleAxisWarning")
@pytest.mark.parametrize("axes", [{}, {"dp": 2}, {"tp": 2}], ids=["alone", "dp", "tp"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", cases(["mlp"], ["gpt", "unet", "translator"]))
def test_each_distinct_task_is_compiled_once(
    name: str, schedule: str, axes: dict[str, int], compilations: list[Any]
) -> None:
    case = model(name, 8)
    want, counts = torch.func.grad_and_value(case.loss)(*case.args), []
    for microbatches in (4, 5):
        step = step_of(case.loss, microbatches, axes, schedule)
        before = len(compilations)
        for _ in range(2):
            have = whole(step(*case.args))
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-9)
        counts.append(len(compilations) - before)
    # For each of two or four chunks a forward and the parts of a backward; the first and the last
    # microbatch may differ, where sums begin and end.
    assert counts[0] == counts[1] or name == "unet", counts
    assert counts[0] <= 3 * 2 * (4 if schedule in ("interleaved", "zb-v") else 2)


def test_a_region_for_each_task() -> None:
    case = model("mlp", 8)
    program = step_of(case.loss, 4, {}).lower(*case.args)
    graph = program.runtime.graph(program).graph
    regions: list[Any] = []

    def compiled(region: torch.fx.Graph, repeated: bool) -> Any:
        assert not repeated
        regions.append(region)
        return lambda values: values

    outer = by_regions(graph, compiled)
    assert outer is not None
    calls = [node for node in outer.nodes if isinstance(node.target, Region)]
    tasks = [node.meta["task"] for node in calls]
    assert len(tasks) == len(set(tasks)) == 2 * 4 * 2
    assert len(regions) <= 2 * (1 + 3)  # the first and the last backward begin and end the sums


def test_dropout_and_recomputation() -> None:
    """Random bits of a microbatch are drawn outside; what is recomputed is recomputed inside."""

    def loss(p: Any, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        for i, w in enumerate(p):
            with scope(f"layer/{i}"):
                x = nn.dropout(random.fold_in(key, i), torch.tanh(x @ w), 0.5)
        return x.square().sum()

    p, x, key = [torch.eye(4).double()] * 4, torch.rand(8, 4).double(), random.key(0)
    want = torch.func.grad(loss)(p, x, key)
    mesh = Mesh({"pp": 2}, virtual=True)
    for fn in (loss, checkpoint(loss, where="layer/*")):
        step = pipeline(torch.func.grad(fn), mesh, "pp", microbatches=4, batch=(None, 0, None))
        have = whole(jit(step, backend="aot_eager")(p, x, key))
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


def test_what_does_not_repeat_is_compiled_as_one(compilations: list[Any]) -> None:
    case = model("mlp", 8)
    have = whole(step_of(case.loss, 1, {})(*case.args))
    want = torch.func.grad_and_value(case.loss)(*case.args)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
    assert len(compilations) == 1
    jit(lambda x: x + 1, backend="aot_eager")(torch.ones(2))
    assert len(compilations) == 2
