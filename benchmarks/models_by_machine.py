"""HuggingFace's families and image networks, planned by rules and for the machine as it is measured.

    python benchmarks/models_by_machine.py                  all of them; the table is saved in results/
    python benchmarks/models_by_machine.py --only ViT       those whose names contain a text, not saved

The gradients of each on two gloo ranks: with parameters and batch split over one axis, as in full
sharding; with parameters split along their first dims, of whatever use, and the batch whole; images split
by lines. Both plans run in one process, A-B-B-A, with a barrier before each call, and their gradients are
compared. The models are tiny, so that most of a call is latency and overhead.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench import RESULTS, aligned
from bench import machine as host
from images import NETS
from rivals import RANKS, in_turns, on_ranks

from torchard import Machine, Mesh, P, machines, place, shard, tree

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

from zoo import FAMILIES, Case, full

ROUNDS, WARMUP = 10, 2
LEVELS, PIXELS = 2, 32


class Model(NamedTuple):
    """A loss, the specs of its two arguments, and these."""

    name: str
    axis: str
    loss: Callable[..., torch.Tensor]
    specs: tuple[Any, Any]
    args: tuple[Any, Any]


def families(only: str) -> Iterator[Model]:
    for name in FAMILIES:
        if only in name:
            case = Case.single(name)
            loss, args = case.loss(case.fn), (case.params, case.inputs)
            for axis, batch in (("fsdp", P("fsdp")), ("tp", P())):
                specs = {
                    k: P(axis) if p.ndim and p.shape[0] % RANKS == 0 else P()
                    for k, p in args[0].items()
                }
                yield Model(name, axis, loss, (specs, batch), args)


def networks(only: str) -> Iterator[Model]:
    for name, make in NETS.items():
        if only in name:
            torch.manual_seed(0)
            net = make(LEVELS, PIXELS)
            args = tree.map(lambda s: torch.randn(s.shape), net.params), torch.randn(net.image)

            def loss(params: Any, x: torch.Tensor, fn: Any = net.fn) -> torch.Tensor:
                return (fn(params, x, lambda y: y) ** 2).sum()

            yield Model(name, "lines", loss, (P(), P(None, None, "lines")), args)


def rows_of(model: Model, on: Machine, rounds: int) -> list[list[str]]:
    """A row for the plan by rules, and one for that on a measured machine."""
    mesh = Mesh({model.axis: RANKS})
    args = place(model.args, mesh, model.specs)
    runs = {
        name: shard(torch.func.grad(model.loss), mesh, out_specs=model.specs[0], machine=machine)
        for name, machine in (("rules", None), ("machine", on))
    }
    first, second = (tree.leaves(run(*args)) for run in runs.values())
    first, second = [*map(full, first)], [*map(full, second)]
    size = max(float(x.abs().max()) for x in first)
    off = max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))
    steps = {name: lambda _, run=run: run(*args) for name, run in runs.items()}
    for step in steps.values():
        for _ in range(WARMUP):
            step(0)
    rows, timings = [], in_turns(steps, rounds)
    for (name, run), timing in zip(runs.items(), timings, strict=True):
        plan = run.lower(*args)
        low, high = timing.quartiles_of_times(timings[0])
        sent = sum(c.bytes * c.times for c in plan.collectives)
        calls, took = sum(c.times for c in plan.collectives), plan.time(on).seconds
        rows.append([
            *(model.name, model.axis, name, f"{sent:,}", str(calls), f"{plan.peak / 1e6:.2f}"),
            *(f"{1e3 * took:.1f}", f"{1e3 * timing.median:.1f}", f"{timing.times(timings[0]):.2f}"),
            *(f"{low:.2f}–{high:.2f}", f"{off / size:.0e}" if name == "machine" else ""),
        ])  # fmt: skip
    return rows


def measured(only: str, rounds: int) -> list[list[str]]:
    """The rows of all models; what fails is printed, and left out."""
    warnings.simplefilter("ignore")
    rows, on = list[list[str]](), dict[str, Machine]()
    for model in itertools.chain(networks(only), families(only)):
        try:
            if model.axis not in on:
                on[model.axis] = machines.measure(Mesh({model.axis: RANKS}))
            rows += rows_of(model, on[model.axis], rounds)
        except Exception:  # the same one on each rank: the other models still run
            print(f"{model.name}, {model.axis}")
            traceback.print_exc(limit=-3)
            continue
        if dist.get_rank() == 0:
            print(*("  ".join(row) for row in rows[-2:]), sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a text in the names of models")
    parser.add_argument("--quick", action="store_true", help="one model, not saved")
    options = parser.parse_args()
    only = "ViT" if options.quick else options.only
    head = ["model", "axis", "plan", "bytes", "calls", "peak MB", "predicted ms", "ms", "ratio"]
    table = [[*head, "quartiles", "differs"], *on_ranks(measured, only, ROUNDS)]
    text = f"{host()}\n{aligned(table)}\n"
    if not only:
        name = f"{datetime.date.today()}-models_by_machine-torch-{torch.__version__.split('+')[0]}.txt"
        (RESULTS / name).write_text(text)


if __name__ == "__main__":
    main()
