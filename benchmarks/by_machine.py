"""Training steps planned by rules, and for the machine as it is measured: seconds on two gloo ranks.

    python benchmarks/by_machine.py            two minutes; the table is saved in results/
    python benchmarks/by_machine.py --quick    the smallest size, few rounds, nothing saved

Each is a GPT with AdamW in one of three sizes (`plans.py`), placed for data, fully sharded or tensor
parallelism, timed in one process, A-B-B-A, each step with a barrier before it.
"""

from __future__ import annotations

import argparse
import datetime
from typing import Any

import torch
from bench import RESULTS, aligned
from bench import machine as host
from plans import SIZES, Plan, PlannedStep
from rivals import RANKS, in_turns, on_ranks

from torchard import Mesh, machines

ROUNDS, WARMUP = 16, 3


def measured(plan: Plan, rounds: int) -> list[list[str]]:
    """A row for the plan by rules, and one for the plan on the measured machine."""
    on = machines.measure(Mesh(dict(plan.axes)))
    steps = {"rules": PlannedStep(plan), "machine": PlannedStep(plan, machine=on)}
    for step in steps.values():
        for number in range(WARMUP):
            step(number)
    rows, timings = [], in_turns(dict(steps), rounds)
    for (name, step), timing in zip(steps.items(), timings, strict=True):
        lowered = step.lowered()
        low, high = timing.quartiles
        least, most = timing.quartiles_of_times(timings[0])
        took = [f"{1e3 * timing.median:.1f}", f"{1e3 * low:.1f}–{1e3 * high:.1f}"]
        ratio = [f"{timing.times(timings[0]):.2f}", f"{least:.2f}–{most:.2f}"]
        calls = sum(each.times for each in lowered.collectives)
        predicted = f"{1e3 * lowered.time(on).seconds:.1f}"
        rows.append([name, f"{step.planned_bytes():,}", str(calls), predicted, *took, *ratio])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest size, few rounds")
    quick = parser.parse_args().quick
    head = ["step", "axis", "plan", "bytes", "calls", "predicted ms", "ms", "quartiles", "ratio"]
    table: list[list[Any]] = [[*head, "quartiles"]]
    for name, size in SIZES.items():
        if quick and name != "calls":
            continue
        for axis in ("dp", "fsdp", "tp"):
            rows = on_ranks(measured, Plan(size, ((axis, RANKS),)), 3 if quick else ROUNDS)
            table += [[name, axis, *row] for row in rows]
    text = f"{host()}\n{aligned(table)}\n"
    print(text)
    if not quick:
        name = f"{datetime.date.today()}-by_machine-torch-{torch.__version__.split('+')[0]}.txt"
        (RESULTS / name).write_text(text)


if __name__ == "__main__":
    main()
