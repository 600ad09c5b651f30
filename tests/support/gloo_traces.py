"""Traces of real ranks: what `gloo.py` runs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import traces
from torch._C._distributed_c10d import _get_work_registry_size
from torch.profiler import ProfilerActivity, profile

from torchard import Mesh, jit

__all__ = ["CHECKS"]


def names_in_a_trace(rank: int, world: int) -> dict[str, traces.Found]:
    """Two ranks are enough."""
    if world != 2:
        return {}
    mesh = Mesh({"tp": world})
    return {case: traces.found(case, mesh) for case in traces.CASES}


def gathers_by_any_form(rank: int, world: int) -> dict[str, list[Any]]:
    """The names of what gathers, and how many were not waited for, of a step as it is and compiled."""
    if world != 2:
        return {}
    mesh, found = Mesh({"tp": world}), {}
    for backend in ("", "eager", "inductor"):
        run, args = traces.fully_sharded(mesh)
        run = jit(run, backend=backend) if backend else run
        run(*args)
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
            run(*args)
        names = {event.name for event in trace.events()}
        gathers = sorted(name for name in names if name.startswith("c10d::") and "gather" in name)
        found[backend] = [gathers, _get_work_registry_size()]
    return found


CHECKS: dict[str, Callable[[int, int], Any]] = {
    "gathers_by_any_form": gathers_by_any_form,
    "names_in_a_trace": names_in_a_trace,
}
