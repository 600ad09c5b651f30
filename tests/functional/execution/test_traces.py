"""A profiler's trace of a run shows the scopes of the model and the collectives of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import traces
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from torchard import Mesh, P, jit, place, scope, shard, trace
from torchard.sharding.scheduling.bucket import _common

LAYERS = ("block/0", "block/1")
SCOPES = {
    f"{scope} {phase}"
    for layer in LAYERS
    for scope in (layer, f"{layer}/norm", f"{layer}/mlp")
    for phase in ("forward", "backward")
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", traces.CASES)
def test_the_plan_s_collectives_once_each(case: str, ranks: int) -> None:
    plan, sent, waits, others = traces.found(case, Mesh({"tp": ranks}, virtual=True))
    assert plan and sent == plan and waits == {}
    want = {
        "neighbours": {"rolled", "ring forward"},
        "manual": {"summed", "sum forward"},
        "twins": {"both"},
    }
    scopes = want.get(case, SCOPES | {"step"})
    # What has no scope has a phase.
    assert scopes <= {*others} <= scopes | {"forward", "backward"}


def test_scopes_are_nested_and_collectives_are_inside_of_what_runs() -> None:
    run, args = traces.tensor_parallel(Mesh({"tp": 2}, virtual=True))
    events = traces.regions(lambda: run(*args))
    (whole,) = (event for event in events if event["name"] == "step")
    assert all(traces.within(event, whole) for event in events)
    for phase in ("forward", "backward"):
        for layer in LAYERS:
            outer = [event for event in events if event["name"] == f"{layer} {phase}"]
            inner = [event for event in events if event["name"] == f"{layer}/mlp {phase}"]
            assert inner and all(any(traces.within(i, o) for o in outer) for i in inner)
            sent = f"all_reduce over tp, {layer}/mlp {phase}"
            (one,) = (event for event in events if event["name"] == sent)
            assert any(traces.within(one, i) for i in inner) or phase == "backward"


def test_forward_and_backward_of_autograd() -> None:
    mesh = Mesh({"tp": 2}, virtual=True)
    run = shard(traces.model, mesh)
    params = place(traces.parameters(), mesh, [traces.TENSOR] * 2)
    x = torch.ones(6, 4, requires_grad=True)
    events = traces.regions(lambda: run(params, x).backward())
    names = [event["name"] for event in events]
    assert names.count("model_forward") == names.count("model_backward") == 1
    assert {*names} >= SCOPES
    (half,) = (event for event in events if event["name"] == "model_backward")
    assert all(traces.within(e, half) for e in events if e["name"].endswith(" backward"))


def test_a_compiled_program_has_one_name() -> None:
    run, args = traces.tensor_parallel(Mesh({"tp": 2}, virtual=True))
    compiled = jit(run, backend="aot_eager")
    names = [event["name"] for event in traces.regions(lambda: compiled(*args))]
    assert names == ["step, compiled by aot_eager"]


@pytest.mark.parametrize(
    ("scopes", "name"),
    [
        (["a/b", "a/c", "a"], "a"),
        (["a/b/c", "a/b/d"], "a/b"),
        (["ab", "ac", "ab"], "ab + 1 more"),
        (["", "a", "b/c"], "a + 2 more"),
        (["", ""], ""),
    ],
)
def test_a_merged_collective_has_the_scope_its_members_share(scopes: list[str], name: str) -> None:
    assert _common(scopes) == name


def profiled(run: Any) -> Any:
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        return run()


class Seen(TorchDispatchMode):
    """The operations that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_the_program_and_no_marks() -> None:
    run, args = traces.tensor_parallel(Mesh({"tp": 2}, virtual=True))
    run(*args)
    with Seen() as without:
        run(*args)
    with Seen() as seen:
        profiled(lambda: run(*args))
    assert [n for n in seen.names if "profiler" not in n] == without.names
    inside = seen.names[seen.names.index(without.names[0]) :]
    assert inside[: len(without.names)] == without.names


def test_results_and_memory_are_those_without_a_profiler() -> None:
    run, args = traces.fully_sharded(Mesh({"tp": 3}, virtual=True))
    (grads, value), (again, same) = run(*args), profiled(lambda: run(*args))
    assert torch.equal(value, same)
    for one, other in zip(grads, again, strict=True):
        assert all(torch.equal(one[k].full(), other[k].full()) for k in one)
    program = trace(lambda x: (x.sin() + 1, x * 2))(torch.ones(3))
    parts = [torch.ones(3)]
    assert len(profiled(lambda: program.bind()(parts))) == 2 and parts == []


def test_an_error_leaves_no_region_open() -> None:
    def lookup(index: torch.Tensor) -> torch.Tensor:
        with scope("outer"), scope("inner"):
            return torch.ones(3)[index]

    run = shard(lookup, Mesh({"dp": 2}, virtual=True), in_specs=P("dp"))

    def fails() -> None:
        with pytest.raises(IndexError) as raised:
            run(torch.tensor([0, 9]))
        assert "in outer/inner forward" in raised.value.__notes__[0]

    run(torch.tensor([0, 1]))
    events = traces.regions(fails)
    assert {"lookup", "outer/inner forward"} <= {event["name"] for event in events}


def test_under_transforms() -> None:
    """Marks are no operations to a functorch level."""
    run = shard(lambda x: x.sin().sum(), Mesh({"dp": 2}, virtual=True), in_specs=P("dp"))
    x = torch.ones(5, 4)
    want = torch.func.vmap(torch.func.grad(run))(x)
    assert torch.equal(profiled(lambda: torch.func.vmap(torch.func.grad(run))(x)), want)
    with FlopCounterMode(display=False):
        assert torch.equal(profiled(lambda: torch.func.jacrev(run)(x[0])), want[0])
