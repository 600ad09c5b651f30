"""Predicted beside measured seconds of training steps on gloo ranks, on a machine measured just before.

    python benchmarks/predicted.py              two and four ranks; the table is saved in results/
    python benchmarks/predicted.py --ranks 2    fewer, nothing saved

`machines.measure` times operations of another step, and collectives alone; then each plan of a GPT with
AdamW is timed (the median of rounds, on the slowest rank) and predicted. The check is that the median
error is at most 15 % for steps of each size, and that eight or more plans of one model are ranked as
they are measured (Kendall's tau of at least 0.85, over all pairs). Then each rate of the machine is made
4 times as high and as low: a machine that is wrong has to fail this check.
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

import torch
import torch.distributed as dist
from bench import RESULTS, aligned
from bench import machine as host
from plans import SIZES, Plan, PlannedStep, plans
from rivals import on_ranks

from torchard import Link, Machine, Mesh, machines

MOST_ERROR, LEAST_TAU, LEAST_PLANS, FACTOR = 0.15, 0.85, 8, 4
WARMUP, ROUNDS = 3, 15


class Found(NamedTuple):
    """The seconds of a plan: measured, with quartiles, and what `predicted` needs."""

    plan: Plan
    seconds: float
    low: float
    high: float
    lowered: Any


def timed(plan: Plan) -> Found:
    step, took = PlannedStep(plan), []
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


def _named(shape: Sequence[int]) -> dict[str, int]:
    return {f"axis{i}": size for i, size in enumerate(shape)}


def along(plan: Plan, known: Machine) -> Machine:
    """The machine with the links of a measured mesh for the axes of a plan, in order."""
    names = {f"axis{i}": axis for i, (axis, _) in enumerate(plan.axes)}
    links = {}
    for name, link in known.links.items():
        axis, *kind = name.split("/")
        links["/".join([names[axis], *kind])] = link
    return replace(known, links=links)


def compared() -> tuple[list[tuple[Plan, float, float, float]], dict[str, list[float]]]:
    """The seconds of each plan, and those predicted on the machine and on wrong ones."""
    each = plans(dist.get_world_size())
    known = {shape: machines.measure(Mesh(_named(shape))) for shape in {p.shape: 0 for p in each}}
    predicted: dict[str, list[float]] = {}
    rows = []
    for plan in each:
        found = timed(plan)
        if dist.get_rank() == 0:
            print(plan, file=sys.stderr, flush=True)
        rows.append(found[:4])
        if dist.get_rank() > 0:
            continue
        for name, machine in falsified(along(plan, known[plan.shape])).items():
            predicted.setdefault(name, []).append(found.lowered.time(machine).seconds)
    return rows, predicted


def verdict(rows: Sequence[Any], predicted: Sequence[float]) -> tuple[list[float], list[float]]:
    """For each size, the median relative error; and Kendall's tau where there are enough plans."""
    errors, taus = [], []
    for size in SIZES.values():
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
    names = {size: name for name, size in SIZES.items()}
    lines = [["step", "plan", "measured ms", "quartiles", "predicted ms", "error"]]
    for (plan, median, low, high), guess in zip(rows, predicted["as measured"], strict=True):
        spread = f"{1e3 * low:.1f}–{1e3 * high:.1f}"
        times = [f"{1e3 * median:.1f}", spread, f"{1e3 * guess:.1f}", f"{guess / median - 1:+.0%}"]
        lines.append([names[plan.size], str(plan), *times])
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
