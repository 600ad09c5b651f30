"""pipeline: the plain function's values and derivatives, whatever the schedule, and an expert's sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import optree
import pytest
import torch
from any_size import fuse
from microbatched import BATCH, DERIVED
from pipelined import MODELS, Model, model, placed_specs, whole

from torchard import Mesh, P, checkpoint, jit, pipeline, place, shard
from torchard.functional.programs.records import Records
from torchard.sharding.pipelining.schedules import SCHEDULES

F64 = torch.float64
COUNTS = (1, 4, 5, 8)
CHUNKS = {"interleaved": 2, "zb-v": 2}  # on each rank, where there are several


def on(case: Model, ranks: int, count: int = 4, schedule: str = "1f1b", **axes: int) -> Any:
    """What makes a pipeline of a function of the model's arguments."""
    mesh = Mesh({"pp": ranks, **axes}, virtual=True)
    batch = BATCH if count > 1 else None

    def transform(fn: Callable[..., Any]) -> Any:
        return pipeline(
            fn, mesh, "pp", stages=case.layers, microbatches=count, batch=batch, schedule=schedule
        )

    return transform


def close(have: Any, want: Any) -> None:
    torch.testing.assert_close(whole(have), want, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(480)
@pytest.mark.parametrize(
    ("name", "ranks", "count", "schedule", "derived"),
    list(product(MODELS, (2, 3, 4), COUNTS, SCHEDULES, DERIVED)),
)
def test_equals_the_plain_function(
    name: str, ranks: int, count: int, schedule: str, derived: str
) -> None:
    case = model(name, 4 if ranks * CHUNKS.get(schedule, 1) <= 4 else 8)
    want = DERIVED[derived](lambda f: f, case.loss)(*case.args)
    close(DERIVED[derived](on(case, ranks, count, schedule), case.loss)(*case.args), want)


def integers(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Sums and products of integers, which no order of operations changes."""
    for w in params:
        x = (x @ w).relu() - x
    return (x * y).sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), [(2, 4), (3, 5), (4, 8)])
def test_integers_are_exact(ranks: int, count: int, schedule: str) -> None:
    params = [torch.randint(-1, 2, (4, 4)).float() for _ in range(8)]
    x, y = (torch.randint(-2, 3, (40, 4)).float() for _ in "xy")
    mesh = Mesh({"pp": ranks}, virtual=True)
    both = torch.func.grad_and_value(integers)
    run = pipeline(both, mesh, "pp", microbatches=count, batch=BATCH, schedule=schedule)
    have, want = whole(run(params, x, y)), both(params, x, y)
    assert torch.equal(have[1], want[1]) and all(map(torch.equal, have[0], want[0]))


# -- other transforms, other axes -----------------------------------------------------------------------

STACKS: dict[str, Callable[[Any, Callable[..., Any]], Any]] = {
    "checkpoint inside": lambda t, f: t(checkpoint(f)),
    "checkpoint outside": lambda t, f: checkpoint(t(f)),
    "fuse inside": lambda t, f: t(fuse(f)),
    "fuse outside": lambda t, f: fuse(t(f)),
    "jit": lambda t, f: jit(t(f), backend="eager"),
    "in a trace": lambda t, f: jit(lambda *args: t(f)(*args), backend="eager"),
}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("derived", ["value", "grad outside", "grad inside", "vmap", "jvp"])
@pytest.mark.parametrize(("name", "stack"), list(product(MODELS, STACKS)))
def test_other_transforms(name: str, stack: str, derived: str) -> None:
    case = model(name)
    want = DERIVED[derived](lambda f: f, case.loss)(*case.args)
    transform = on(case, 2, 4)
    close(DERIVED[derived](lambda f: STACKS[stack](transform, f), case.loss)(*case.args), want)


def given(case: Model, mesh: Mesh, inside: str) -> tuple[Any, ...]:
    """The model's arguments, with parameters on stages, and split as the name says."""
    params, x, y = case.args
    tp = inside in ("tp", "dp and tp")
    if inside == "fsdp":
        specs: Any = P("dp")
    else:
        specs = placed_specs(params, mesh.shape["pp"], tp)
    batch = P("dp") if "dp" in mesh.shape else P()
    if inside == "sequence":
        batch = P(None, "dp")
    return place(params, mesh, specs), place(x, mesh, batch), place(y, mesh, batch)


INSIDE: dict[str, dict[str, int]] = {
    "alone": {},
    "tp": {"tp": 2},
    "dp": {"dp": 2},
    "dp and tp": {"dp": 2, "tp": 2},
    "fsdp": {"dp": 2},
    "sequence": {"dp": 2},
}


@pytest.mark.sampled(48)
@pytest.mark.filterwarnings("ignore::torchard.IdleAxisWarning")
@pytest.mark.parametrize("derived", ["value and grad inside", "grad outside", "jvp"])
@pytest.mark.parametrize(
    ("name", "inside", "schedule"), list(product(MODELS, INSIDE, ("1f1b", "interleaved", "zb-v")))
)
def test_other_axes(name: str, inside: str, schedule: str, derived: str) -> None:
    case = model(name)
    transform = on(case, 2, 4, schedule, **INSIDE[inside])
    mesh = Mesh({"pp": 2, **INSIDE[inside]}, virtual=True)
    want = DERIVED[derived](lambda f: f, case.loss)(*case.args)
    close(DERIVED[derived](transform, case.loss)(*given(case, mesh, inside)), want)


# -- what is sent ---------------------------------------------------------------------------------------


def sent(step: Any, *args: Any) -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter((c.kind, c.shape) for c in step.lower(*args).collectives)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [4, 5, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_cross_and_nothing_else(schedule: str, count: int) -> None:
    """Between neighbours on different ranks: one activation there, and one gradient back."""
    case = model("mlp")
    crossings = {"interleaved": 3, "zb-v": 2}.get(schedule, 1)
    step = on(case, 2, count, schedule)(torch.func.grad(case.loss))
    mesh = Mesh({"pp": 2}, virtual=True)
    if crossings == 1:
        params = place(case.args[0], mesh, placed_specs(case.args[0], 2))
        assert sent(step, params, *case.args[1:]) == {("send", (40 // count, 4)): 2 * count}
    assert sent(step, *case.args) == {("send", (40 // count, 4)): 2 * crossings * count}


def test_the_total_says_that_it_is_over_stages() -> None:
    """No rank sends what all stages send; without stages, every rank does."""
    case = model("mlp")
    records = on(case, 2, 4, "1f1b")(torch.func.grad(case.loss)).lower(*case.args).collectives
    total = sum(c.bytes for c in records)
    summed = f"{len(records)} collectives, {total:,} bytes per rank, summed over stages"
    assert str(records).splitlines()[-1] == summed
    alone = Records([replace(c, kind="all_gather") for c in records])
    assert str(alone).endswith("bytes per rank")


def test_a_tied_embedding_is_sent_once_and_its_gradient_is() -> None:
    case = model("gpt")
    mesh = Mesh({"pp": 4}, virtual=True)
    params = place(case.args[0], mesh, placed_specs(case.args[0], 4))
    step = on(case, 4, 5)(torch.func.grad(case.loss))
    found = sent(step, params, *case.args[1:])
    assert found[("send", (8, 3, 4))] == 2 * 3 * 5
    assert found[("send", (7, 4))] == 2
    grads = step(params, *case.args[1:])
    assert [g.spec for g in (grads["embedding"], grads["layers"][3]["up"])] == [
        P(None, None).at(pp=0),
        P(None, None).at(pp=3),
    ]


def test_gradients_are_added_up_over_dp_once() -> None:
    case = model("mlp")
    for count in (1, 4, 5):
        mesh = Mesh({"pp": 2, "dp": 2}, virtual=True)
        step = on(case, 2, count, dp=2)(torch.func.grad(case.loss))
        params, *batch = given(case, mesh, "dp")
        size = sum(p.numel() for layer in case.args[0]["layers"] for p in layer.values())
        found = [c for c in step.lower(params, *batch).collectives if c.kind != "send"]
        assert [(c.kind, c.axes, c.shape) for c in found] == [("all_reduce", ("dp",), (size // 2,))] * 2


def test_a_pipeline_inside_of_a_function_is_put_in_order() -> None:
    case = model("mlp")
    mesh = Mesh({"pp": 2}, virtual=True)
    how = {"stages": "layer/*", "microbatches": 4, "batch": BATCH}
    step = pipeline(torch.func.grad(case.loss), mesh, "pp", **how)
    outer = jit(lambda *args: optree.tree_map(lambda g: 2 * g, step(*args)), backend="eager")
    found, wanted = (f.lower(*case.args).schedule.schedule.ranks for f in (outer, step))
    assert found == wanted
    close(outer(*case.args), optree.tree_map(lambda g: 2 * g, torch.func.grad(case.loss)(*case.args)))


def test_an_inner_shard_is_planned_inside_the_stages() -> None:
    case = model("mlp")
    mesh = Mesh({"pp": 2, "dp": 2}, virtual=True)
    inner = shard(torch.func.grad(case.loss), mesh, in_specs=(None, P("dp"), P("dp")))
    step = pipeline(inner, mesh, "pp", stages="layer/*", microbatches=4, batch=BATCH)
    close(step(*case.args), torch.func.grad(case.loss)(*case.args))
