"""Predicted beside measured seconds of training steps on gloo ranks, on a machine measured just before.

    python benchmarks/predicted.py              two and four ranks; the table is saved in results/
    python benchmarks/predicted.py --ranks 2    fewer, nothing saved

`machines.measure` times operations of another step, and collectives alone; then each plan of a GPT with
AdamW is timed (the median of rounds, on the slowest rank) and predicted. The check is that the median
error is at most 15 % for steps of each size, and that eight or more plans of one model are ranked as they
are measured (Kendall's tau of at least 0.85, over all pairs). Then each rate of the machine is made 4 times as high and
as low: a machine that is wrong has to fail this check.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import gpt
import torch
import torch.distributed as dist
from bench import RESULTS, aligned
from bench import machine as host
from rivals import BATCHES, DECAY, RATE, SPLIT, on_ranks

from torchard import (
    Colwise,
    Link,
    Machine,
    Mesh,
    P,
    Rowwise,
    functionalize,
    machines,
    optim,
    parallelize,
    pipeline,
    place,
    shard,
    stage_specs,
)

MOST_ERROR, LEAST_TAU, LEAST_PLANS, FACTOR = 0.15, 0.85, 8, 4
WARMUP, ROUNDS = 3, 15


class Size(NamedTuple):
    """The size of a model's step: the width, sequences, and tokens of each."""

    width: int
    batch: int
    length: int


# What steps of these sizes mostly do: multiply, call small operations and collectives, send gradients.
SIZES = {"multiplies": Size(192, 8, 64), "calls": Size(32, 8, 8), "sends": Size(320, 8, 8)}


class Plan(NamedTuple):
    """How a step runs: its size, the sizes of axes, and a pipeline's schedule.

    An axis is dp, fsdp (of which the batch is split as well), tp or pp.
    """

    size: str
    axes: tuple[tuple[str, int], ...]
    schedule: str = ""

    def __str__(self) -> str:
        return f"{' '.join(f'{a}={n}' for a, n in self.axes)} {self.schedule}".strip()


def plans(ranks: int) -> list[Plan]:
    """All plans in the first two sizes; in the last those that send parameters or gradients."""
    split = [((axis, ranks),) for axis in ("dp", "fsdp", "tp")]
    staged = [((("pp", ranks),), schedule) for schedule in ("1f1b", "gpipe")]
    if ranks == 4:
        split += [((axis, 2), ("tp", 2)) for axis in ("dp", "fsdp")]
        staged += [((("pp", 2), (axis, 2)), "1f1b") for axis in ("dp", "tp")]
    ways = [*((axes, "") for axes in split), *staged]
    return [
        Plan(size, *way)
        for size in SIZES
        for way in ways
        if size != "sends" or {axis for axis, _ in way[0]} & {"dp", "fsdp"}
    ]


def batch_of(size: Size, number: int) -> tuple[torch.Tensor, ...]:
    seed = torch.Generator().manual_seed(number)
    return torch.randint(gpt.VOCABULARY, (2, size.batch, size.length), generator=seed).unbind()


class Step:
    """A training step by a plan; it keeps the parameters and the optimizer's state."""

    def __init__(self, plan: Plan) -> None:
        size = SIZES[plan.size]
        torch.manual_seed(0)
        fn, params = functionalize(gpt.GPT(size.width, size.length))
        params = {name: p.detach().clone() for name, p in params.items()}
        optimizer = optim.adamw(RATE, weight_decay=DECAY)

        def train(params: Any, state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            grads, loss = torch.func.grad_and_value(fn)(params, x, y)
            return (*optimizer.update(grads, state, params), loss)

        axes = dict(plan.axes)
        mesh = Mesh(axes)
        rows = next((a for a in ("dp", "fsdp") if a in axes), None)
        self.batches = [place(batch_of(size, n), mesh, P(rows) if rows else P()) for n in range(BATCHES)]
        specs: Any = {name: P() for name in params}
        if "tp" in axes or "fsdp" in axes:
            kinds = {"out": Colwise, "in": Rowwise}
            split = {f"blocks.*.{name}": kinds[dim]() for name, dim in SPLIT.items()}
            whole = "fsdp" if "fsdp" in axes else None
            specs, _ = parallelize(
                fn, mesh, split if "tp" in axes else {}, batch=rows, fsdp=whole
            )
        state = optim.AdamState(P(), specs, specs)
        if plan.schedule:
            where = {"stages": "blocks.*", "microbatches": 4, "batch": (None, None, 0, 0)}
            self.run = pipeline(train, mesh, "pp", schedule=plan.schedule, **where)
            if "tp" not in axes:
                specs = stage_specs(self.run, params, optimizer.init(params), *batch_of(size, 0))
        else:
            self.run = shard(train, mesh, out_specs=(specs, state, P()))
        self.params = place(params, mesh, specs)
        self.state = optimizer.init(self.params)

    def __call__(self, number: int) -> None:
        data = self.batches[number % BATCHES]
        self.params, self.state, loss = self.run(self.params, self.state, *data)
        float(loss)

    def lowered(self) -> Any:
        return self.run.lower(self.params, self.state, *self.batches[0])


class Found(NamedTuple):
    """The seconds of a plan: measured, with quartiles, and what `predicted` needs."""

    plan: Plan
    seconds: float
    low: float
    high: float
    lowered: Any


def timed(plan: Plan) -> Found:
    step, took = Step(plan), []
    for number in range(WARMUP + ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        step(number)
        took.append(time.perf_counter() - began)
    slowest = torch.tensor(took[WARMUP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    low, median, high = statistics.quantiles(slowest.tolist(), n=4)
    return Found(plan, median, low, high, step.lowered())


def falsified(known: Machine) -> dict[str, Machine]:
    """Machines with one rate that is wrong."""
    wrong: dict[str, Machine] = {"as measured": known}
    for factor, text in ((FACTOR, f"x {FACTOR}"), (1 / FACTOR, f"/ {FACTOR}")):
        flops = {dtype: rate * factor for dtype, rate in known.flops.items()}
        links = known.links.items()
        fast = {name: Link(x.bandwidth * factor, x.latency) for name, x in links}
        far = {name: Link(x.bandwidth, x.latency * factor) for name, x in links}
        wrong |= {
            f"FLOPs {text}": replace(known, flops=flops),
            f"bandwidth {text}": replace(known, bandwidth=known.bandwidth * factor),
            f"launches {text}": replace(
                known, launch=known.launch * factor, view=known.view * factor
            ),
            f"links' bandwidth {text}": replace(known, links=fast),
            f"links' latency {text}": replace(known, links=far),
        }
    return wrong


def tau(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Kendall's rank correlation."""
    pairs = list(itertools.combinations(range(len(measured)), 2))
    agreed = sum(
        (measured[i] < measured[j]) == (predicted[i] < predicted[j]) for i, j in pairs
    )
    return 2 * agreed / len(pairs) - 1


def compared() -> tuple[list[tuple[Plan, float, float, float]], dict[str, list[float]]]:
    """The seconds of each plan, and those predicted on the machine and on wrong ones."""
    known: dict[Any, Machine] = {}
    predicted: dict[str, list[float]] = {}
    rows = []
    for plan in plans(dist.get_world_size()):
        if plan.axes not in known:
            known[plan.axes] = machines.measure(Mesh(dict(plan.axes)))
    for plan in plans(dist.get_world_size()):
        found = timed(plan)
        if dist.get_rank() == 0:
            print(plan, file=sys.stderr, flush=True)
        rows.append(found[:4])
        for name, machine in falsified(known[plan.axes]).items():
            predicted.setdefault(name, []).append(found.lowered.time(machine).seconds)
    return rows, predicted


def verdict(rows: Sequence[Any], predicted: Sequence[float]) -> tuple[list[float], list[float]]:
    """For each size, the median relative error; and Kendall's tau where there are enough plans."""
    errors, taus = [], []
    for size in SIZES:
        of = [i for i, row in enumerate(rows) if row[0].size == size]
        measured, guesses = [rows[i][1] for i in of], [predicted[i] for i in of]
        errors.append(
            statistics.median(abs(p / m - 1) for p, m in zip(guesses, measured, strict=True))
        )
        if len(of) >= LEAST_PLANS:
            taus.append(tau(measured, guesses))
    return errors, taus


def report(rows: Sequence[Any], predicted: Mapping[str, Sequence[float]]) -> tuple[str, bool]:
    """The tables, and whether the machine passes and all that are wrong fail."""
    lines = [["step", "plan", "measured ms", "quartiles", "predicted ms", "error"]]
    for (plan, median, low, high), guess in zip(rows, predicted["as measured"], strict=True):
        spread = f"{1e3 * low:.1f}–{1e3 * high:.1f}"
        times = [f"{1e3 * median:.1f}", spread, f"{1e3 * guess:.1f}", f"{guess / median - 1:+.0%}"]
        lines.append([plan.size, str(plan), *times])
    checks = [["machine", *(f"error {size}" for size in SIZES), "tau", ""]]
    good = True
    for name, guesses in predicted.items():
        errors, taus = verdict(rows, guesses)
        passes = max(errors) <= MOST_ERROR and all(t >= LEAST_TAU for t in taus)
        good &= passes == (name == "as measured")
        shown = ", ".join(f"{t:.2f}" for t in taus)
        result = "passes" if passes else "fails"
        checks.append([name, *(f"{error:.1%}" for error in errors), shown, result])
    return aligned(lines) + "\n\n" + aligned(checks), good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=(2, 4))
    options = parser.parse_args()
    texts, good = [host(), ""], True
    for ranks in options.ranks:
        text, fine = report(*on_ranks(compared, ranks=ranks))
        print(f"{ranks} ranks\n{text}\n", flush=True)
        texts += [f"{ranks} ranks", text, ""]
        good &= fine
    if tuple(options.ranks) == (2, 4):
        name = f"{datetime.date.today()}-predicted-torch-{torch.__version__.split('+')[0]}.txt"
        (RESULTS / name).write_text("\n".join(texts))
    sys.exit(0 if good else "the machine does not pass, or a wrong one does")


if __name__ == "__main__":
    main()
