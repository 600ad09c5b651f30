"""The report of a pipeline says what runs: its order, what is in flight, what a stage holds and sends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optree
import pytest
import torch
from effort import cases
from microbatched import BATCH
from pipelined import model, whole

from torchard import Mesh, P, ShapeDtype, jit, optim, pipeline, place, shard, stage_specs
from torchard.functional.execution.storages import Liveness
from torchard.functional.programs.tags import COLLECTIVE, PHASE
from torchard.functional.remat.liveness import liveness_of_ranks
from torchard.sharding.layouts.tags import MICROBATCH
from torchard.sharding.pipelining.schedules import SCHEDULES, PipelineSchedule, Task, named

CHUNKS = {"interleaved": 2, "zb-v": 2}


def step_of(name: str, ranks: int, count: int, schedule: str, **axes: int) -> tuple[Any, tuple[Any, ...]]:
    case = model(name, 8)
    mesh = Mesh({"pp": ranks, **axes}, virtual=True)
    grad = torch.func.grad_and_value(case.loss)
    batch = BATCH if count > 1 else None
    how = {"stages": case.layers, "microbatches": count, "batch": batch, "schedule": schedule}
    return pipeline(grad, mesh, "pp", **how), case.args


def without_empty(wanted: PipelineSchedule, found: PipelineSchedule) -> list[tuple[Task, ...]]:
    """The lists of a schedule without the tasks that have no operations: the first chunk's I."""
    there = {task for tasks in found.ranks for task in tasks}
    empty = {task for tasks in wanted.ranks for task in tasks} - there
    assert all((task.chunk, task.kind) == (0, "I") for task in empty)
    return [tuple(task for task in tasks if task in there) for tasks in wanted.ranks]


@pytest.mark.sampled(20)
@pytest.mark.parametrize(
    ("name", "ranks", "count", "schedule"),
    [
        (name, ranks, count, schedule)
        for name in ("mlp", "gpt")
        for ranks, count in ((2, 4), (3, 5), (4, 8))
        for schedule in SCHEDULES
    ],
)
def test_ranks_run_the_schedule(name: str, ranks: int, count: int, schedule: str) -> None:
    step, args = step_of(name, ranks, count, schedule)
    found = step.lower(*args).schedule.schedule
    wanted = named(schedule, ranks, count)
    assert list(found.ranks) == without_empty(wanted, found)


def test_a_schedule_of_ones_own_is_run() -> None:
    serial = PipelineSchedule(
        tuple(tuple(Task(c, m, kind) for m in range(4) for kind in "FB") for c in range(2)), "serial"
    )
    case = model("mlp")
    step = pipeline(
        torch.func.grad(case.loss),
        Mesh({"pp": 2}, virtual=True),
        "pp",
        microbatches=4,
        batch=BATCH,
        schedule=serial,
    )
    report = step.lower(*case.args).schedule
    assert report.schedule == serial
    assert str(report).startswith("serial on pp, 4 microbatches: bubble 100%")


def kept_at_once(live: Liveness) -> int:
    """The most microbatches of which results of the forward are alive that a backward is to read.

    What was received before the forward is not counted.
    """
    held: list[set[int]] = [set() for _ in live.order]
    for storage in live.allocations:
        node = storage.node
        computed = PHASE.get(node) == "forward" and MICROBATCH.on(node) and not COLLECTIVE.on(node)
        readers = [user for user in node.users if PHASE.get(user) == "backward"]
        if computed and readers and storage.nbytes:
            for at in range(storage.begin, storage.end):
                held[at].add(MICROBATCH.of(node))
    return max(map(len, held))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("ranks", "count", "schedule"),
    [(ranks, count, schedule) for ranks, count in ((2, 4), (4, 8)) for schedule in SCHEDULES],
)
def test_residuals_of_as_many_microbatches_as_in_flight_are_alive(
    ranks: int, count: int, schedule: str
) -> None:
    step, args = step_of("mlp", ranks, count, schedule)
    program = step.lower(*args)
    in_flight = program.schedule.timeline().in_flight
    most = [kept_at_once(live) for live in liveness_of_ranks(program)]
    if CHUNKS.get(schedule, 1) == 1:
        assert tuple(most) == in_flight
    else:  # of two chunks, which may be of the same microbatch
        assert all(m <= n <= 2 * m for m, n in zip(most, in_flight, strict=True))


def test_stages_that_hold_less_have_lower_peaks() -> None:
    """1F1B holds residuals of p - rank microbatches, GPipe of all."""
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        step, args = step_of("mlp", 4, 8, schedule)
        program = step.lower(*args)
        peaks[schedule] = [stage.peak for stage in program.schedule.stages]
        assert program.peak == max(peaks[schedule])
    layers = 2 * 4 * 5 * 4  # bytes: of each microbatch in a stage at least one activation a layer
    for rank in range(4):
        saved = peaks["gpipe"][rank] - peaks["1f1b"][rank]
        assert saved >= (8 - (4 - rank)) * layers
    assert peaks["1f1b"] == sorted(peaks["1f1b"], reverse=True)


@pytest.mark.parametrize("name", cases(["mlp", "translator"], ["gpt", "unet"]))
def test_parameters_are_placed_where_they_are_used(name: str) -> None:
    """Nothing but activations is sent then, and tied weights, once."""
    step, args = step_of(name, 4, 4, "1f1b")
    specs = stage_specs(step, *args)
    at = [next(iter(layer.values())).home for layer in specs["layers"]]
    assert at == sorted(at) and at[0] == (("pp", 0),) and at[-1] == (("pp", 3),)
    for key in ("embedding", "gain", "positions", "head"):
        if key in specs:
            used_by_several = (name, key) in {("gpt", "embedding"), ("gpt", "gain")} | {
                ("translator", "embedding")
            }
            assert bool(specs[key].home) != used_by_several, key
    params = place(args[0], Mesh({"pp": 4}, virtual=True), specs)
    plain, placed = (step.lower(p, *args[1:]).collectives for p in (args[0], params))
    assert sum(c.bytes for c in placed) <= sum(c.bytes for c in plain)
    forward = {c.shape for c in placed if c.kind == "send" and c.phase == "forward"}
    activation = (10, 4) if name in ("mlp", "unet") else (10, 3, 4)
    assert forward <= {activation, (), args[0].get("embedding", torch.tensor(0)).shape}


def test_specs_over_other_axes_stay() -> None:
    step, args = step_of("mlp", 2, 4, "1f1b", tp=2)
    split = {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp")}
    specs = stage_specs(step, *args, specs={"layers": [split] * 8})
    assert specs["layers"][7] == {name: spec.at(pp=1) for name, spec in split.items()}
    params = place(args[0], Mesh({"pp": 2, "tp": 2}, virtual=True), {"layers": [split] * 8})
    assert stage_specs(step, params, *args[1:])["layers"][0]["bias"] == P("tp").at(pp=0)


def test_specs_of_a_whole_training_step() -> None:
    """The optimizer's state follows its parameter, and so do new parameters."""
    case = model("mlp")
    optimizer = optim.adamw(1e-2)

    def train(params: Any, state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        grads, value = torch.func.grad_and_value(case.loss)(params, x, y)
        return *optimizer.update(grads, state, params), value

    mesh = Mesh({"pp": 2}, virtual=True)
    step = pipeline(train, mesh, "pp", microbatches=4, batch=(None, None, 0, 0))
    shapes = optree.tree_map(lambda v: ShapeDtype(v.shape, v.dtype), case.args[0])
    specs = stage_specs(step, shapes, optimizer.init(case.args[0]), *case.args[1:])
    params = place(case.args[0], mesh, specs)
    state = optimizer.init(params)
    found = step.lower(params, state, *case.args[1:]).schedule.schedule
    assert found.ranks == named("1f1b", 2, 4).ranks
    new, _, _ = step(params, state, *case.args[1:])
    assert [layer["up"].spec.home for layer in new["layers"]] == [(("pp", i // 2),) for i in range(4)]


def test_collectives_name_their_task() -> None:
    """So an error of a collective says for which stage and microbatch a rank waited."""
    step, args = step_of("mlp", 2, 4, "1f1b", tp=2)
    split = {"up": P(None, "tp"), "bias": P("tp"), "down": P("tp")}
    specs = stage_specs(step, *args, specs={"layers": [split] * 8})
    params = place(args[0], Mesh({"pp": 2, "tp": 2}, virtual=True), specs)
    found = step.lower(params, *args[1:]).collectives
    sends = [c.note for c in found if c.kind == "send" and c.shape]
    assert sorted(sends) == sorted(
        [f"F{m} of chunk 0" for m in range(4)] + [f"B{m} of chunk 1" for m in range(4)]
    )
    inside = {c.note for c in found if c.kind == "all_reduce" and c.axes == ("tp",)}
    assert {str(Task(c, m, kind)) for c in range(2) for m in range(4) for kind in "FB"} <= inside
    assert found[0].payload.endswith(found[0].note)


def test_a_tied_weight_is_updated_by_all_who_hold_it() -> None:
    """Its gradient is sent once each way; neither the new weight nor the optimizer's state is."""
    case = model("gpt")
    optimizer = optim.adamw(1e-2)

    def train(params: Any, state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return optimizer.update(torch.func.grad(case.loss)(params, x, y), state, params)

    mesh = Mesh({"pp": 2}, virtual=True)
    step = pipeline(train, mesh, "pp", stages="layer/*", microbatches=4, batch=(None, None, 0, 0))
    state = optimizer.init(case.args[0])
    specs = stage_specs(step, case.args[0], state, *case.args[1:])
    params = place(case.args[0], mesh, specs)
    run = step.lower(params, optimizer.init(params), *case.args[1:])
    tied = [c for c in run.collectives if c.kind == "send" and c.shape == (7, 4)]
    assert len(tied) == 2
    have = whole(step(params, optimizer.init(params), *case.args[1:]))
    torch.testing.assert_close(have, train(case.args[0], state, *case.args[1:]), rtol=1e-9, atol=1e-9)


def test_only_a_pipeline_has_a_schedule() -> None:
    case = model("mlp")
    program = shard(case.loss, Mesh({"pp": 2}, virtual=True)).lower(*case.args)
    with pytest.raises(ValueError, match="mlp is not a pipeline"):
        _ = program.schedule


def test_forward_only_and_outside() -> None:
    case = model("mlp")
    run = pipeline(case.loss, Mesh({"pp": 2}, virtual=True), "pp", microbatches=4, batch=BATCH)
    assert all(t.kind == "F" for tasks in run.lower(*case.args).schedule.schedule.ranks for t in tasks)
    joint = run.lower_joint(*case.args).schedule
    assert ["".join(t.kind for t in tasks) for tasks in joint.schedule.ranks] == ["FFFFBBBB"] * 2
    assert joint.timeline().in_flight == (4, 4)
    compiled = jit(run, backend="eager").lower(*case.args)
    assert str(compiled.schedule) == str(run.lower(*case.args).schedule)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_picture(tmp_path: Path, suffix: str) -> None:
    step, args = step_of("mlp", 2, 4, "zb-v")
    report = step.lower(*args).schedule
    path = report.draw(tmp_path / f"schedule.{suffix}")
    assert path.stat().st_size > 1000
    report.draw(path, dict.fromkeys(report.flops, 0.5))
    assert report.timeline(dict.fromkeys(report.flops, 0.5)).length >= 0.5 * 16


def test_a_profile_says_how_long_each_task_took() -> None:
    step, args = step_of("mlp", 2, 4, "1f1b")
    report = step.lower(*args).schedule
    step(*args)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            step(*args)
    seconds = report.measured(profile)
    assert set(seconds) == {task for tasks in report.schedule.ranks for task in tasks}
    run = report.timeline(seconds)
    assert 0 < max(run.busy) <= run.length <= sum(seconds.values())
    calls = [e.time_range.elapsed_us() / 1e6 for e in profile.events() if e.name.startswith("mlp")]
    assert len(calls) == 3 and sum(seconds.values()) <= sum(calls) / 3


def test_waits_are_not_counted() -> None:
    """Two calls of 8 and 12 ms, in a task of 4 and 6 ms, of which a wait, deeper inside, takes 1 ms."""
    step, args = step_of("mlp", 2, 4, "1f1b")
    report = step.lower(*args).schedule
    events = []

    def event(name: str, milliseconds: float, parent: Any = None) -> Any:
        took = SimpleNamespace(elapsed_us=lambda: 1e3 * milliseconds)
        events.append(SimpleNamespace(name=name, time_range=took, cpu_parent=parent))
        return events[-1]

    for each in (4, 6):
        call = event("mlp", 2 * each)
        task = event("F0 of chunk 1", each, call)
        event("wait for send over pp", 1, event("layer/2 forward", 2, task))
        event("wait for all_reduce over dp", 3, call)
    found = report.measured(SimpleNamespace(events=lambda: events))
    assert found == pytest.approx({Task(1, 0, "F"): 4e-3})
