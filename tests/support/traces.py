"""Reading a profiler's trace, and programs whose traces are read: on virtual meshes and on real ranks."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from torchard import Mesh, P, nn, place, psum, scope, shard, shard_map

__all__ = ["CASES", "Found", "found", "regions"]

Params = dict[str, torch.Tensor]


def regions(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The named stretches of the second of two calls, in order of their beginnings."""
    run()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        for number in range(2):
            with record_function(f"step {number}"):
                run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation"]
    (step,) = [event for event in named if event["name"] == "step 1"]
    inside = [event for event in named if event is not step and within(event, step)]
    return sorted(inside, key=lambda event: (event["ts"], -event["dur"]))


def within(event: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether one stretch is inside another."""
    ends = [each["ts"] + each["dur"] for each in (event, other)]
    return bool(other["ts"] <= event["ts"] and ends[0] <= ends[1])


# -- programs ---------------------------------------------------------------------------------------


def block(p: Params, x: torch.Tensor) -> torch.Tensor:
    with scope("norm"):
        h = nn.layer_norm(x, p["norm"], None)
    with scope("mlp"):
        h = nn.linear(nn.gelu(nn.linear(h, p["up"])), p["down"])
    return x + h


def model(params: list[Params], x: torch.Tensor) -> torch.Tensor:
    for i, p in enumerate(params):
        with scope(f"block/{i}"):
            x = block(p, x)
    return x.square().sum()


def step(params: list[Params], x: torch.Tensor) -> Any:
    return torch.func.grad_and_value(model)(params, x)


def parameters() -> list[Params]:
    shapes = {"norm": (4,), "up": (8, 4), "down": (4, 8)}
    return [{k: torch.full(shape, 0.1) for k, shape in shapes.items()} for _ in range(2)]


TENSOR = {"norm": P(), "up": P("tp", None), "down": P(None, "tp")}


def tensor_parallel(mesh: Mesh) -> Any:
    specs = [TENSOR] * 2
    run = shard(step, mesh, out_specs=(specs, P()))
    return run, (place(parameters(), mesh, specs), torch.ones(6, 4))


def fully_sharded(mesh: Mesh) -> Any:
    """Gathers of a layer in one, ahead of their use; reductions waited for late."""
    run = shard(step, mesh, out_specs=(P("tp"), P()))
    return run, (place(parameters(), mesh, P("tp")), place(torch.ones(6, 4), mesh, P("tp")))


def replicated(mesh: Mesh) -> Any:
    """All gradients in one collective."""
    run = shard(step, mesh, out_specs=P())
    return run, (parameters(), place(torch.ones(6, 4), mesh, P("tp")))


def neighbours(mesh: Mesh) -> Any:
    def rolled(x: torch.Tensor) -> torch.Tensor:
        with scope("ring"):
            return x.roll(1, 0) * x.roll(-1, 0)

    return shard(rolled, mesh, out_specs=P("tp")), (place(torch.arange(12.0), mesh, P("tp")),)


def manual(mesh: Mesh) -> Any:
    def summed(x: torch.Tensor) -> torch.Tensor:
        with scope("sum"):
            return psum(x.sin(), "tp").cos()

    return shard_map(summed, mesh, P("tp"), P()), (torch.arange(12.0),)


def twins(mesh: Mesh) -> Any:
    """Two collectives of one name, one right after the other."""

    def both(x: torch.Tensor, y: torch.Tensor) -> Any:
        with scope("twins"):
            return psum(x, "tp"), psum(y, "tp")

    return shard_map(both, mesh, P("tp"), P()), (torch.arange(12.0), torch.ones(12))


CASES: dict[str, Callable[[Mesh], Any]] = {
    case.__name__: case
    for case in (tensor_parallel, fully_sharded, replicated, neighbours, manual, twins)
}
# Counts of the plan's collectives, of those in the trace, and of those waited for there; other names.
Found = tuple[dict[str, int], dict[str, int], dict[str, int], list[str]]


def found(case: str, mesh: Mesh) -> Found:
    """What the trace of a step shows, beside its plan."""
    run, args = CASES[case](mesh)
    plan = Counter(record.title for record in run.lower(*args).collectives)
    names = [event["name"] for event in regions(lambda: run(*args))]
    waits = [n.removeprefix("wait for ") for n in names if n.startswith("wait for ")]
    sent = [n for n in names if " over " in n and not n.startswith("wait for ")]
    others = {n for n in names if " over " not in n}
    return dict(plan), dict(Counter(sent)), dict(Counter(waits)), sorted(others)
