"""Predicted beside measured seconds of training steps on gloo ranks, on a machine measured just before.

    python benchmarks/predicted.py              two and four ranks; the table is saved in results/
    python benchmarks/predicted.py --ranks 2    fewer, nothing saved

`machines.measure` times operations of another step, and collectives alone, before and after the plans:
a host that others use drifts by a fifth within minutes. Each plan of a GPT with AdamW is timed (the mean
of rounds without the slowest eighth, as links are measured, on the slowest rank) and predicted, by the
mean over both. The check is that the median error is at most 15 % for steps of each size, and that eight
or more plans of one model are ranked as they are measured: Kendall's tau of at least 0.85, over the pairs
that are more than two standard errors apart; that over all pairs is printed beside it. Then each rate of
the machine is made 4 times as high and as low: a machine that is wrong has to fail this check.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
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
APART = 2  # standard errors
WARMUP = 3
ROUNDS = dict(zip(SIZES.values(), (16, 48, 16), strict=True))


class Found(NamedTuple):
    """The seconds of a plan: the mean of rounds, its standard error, and their quartiles."""

    plan: Plan
    seconds: float
    error: float
    low: float
    high: float


def timed(plan: Plan) -> tuple[Found, Any]:
    """The seconds of a plan, and its lowered step."""
    step, took = PlannedStep(plan), []
    rounds = ROUNDS[plan.size]
    for number in range(WARMUP + rounds):
        dist.barrier()
        began = time.perf_counter()
        step(number)
        took.append(time.perf_counter() - began)
    slowest = torch.tensor(took[WARMUP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    low, _, high = statistics.quantiles(slowest.tolist(), n=4)
    kept = slowest.sort().values[: -(rounds // 8)]
    error = float(kept.std()) / math.sqrt(len(kept))
    return Found(plan, float(kept.mean()), error, low, high), step.lowered()


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


def tau(rows: Sequence[Found], predicted: Sequence[float], least: float) -> float:
    """Kendall's rank correlation, over pairs that are more than some standard errors apart."""
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(len(rows)), 2)
        if abs(rows[i].seconds - rows[j].seconds) >= least * math.hypot(rows[i].error, rows[j].error)
    ]
    agreed = sum(
        (rows[i].seconds < rows[j].seconds) == (predicted[i] < predicted[j]) for i, j in pairs
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


def measured(each: Sequence[Plan]) -> dict[tuple[int, ...], Machine]:
    """The machine of each shape of mesh."""
    return {shape: machines.measure(Mesh(_named(shape))) for shape in {p.shape: 0 for p in each}}


def compared() -> tuple[list[Found], dict[str, list[float]]]:
    """The seconds of each plan, and those predicted on the machine and on wrong ones."""
    each = plans(dist.get_world_size())
    before = measured(each)
    rows, steps = [], []
    for plan in each:
        found, lowered = timed(plan)
        rows.append(found)
        steps.append(lowered)
        if dist.get_rank() == 0:
            print(plan, file=sys.stderr, flush=True)
    known = (before, measured(each))
    predicted: dict[str, list[float]] = {}
    if dist.get_rank() > 0:
        return rows, predicted
    for plan, lowered in zip(each, steps, strict=True):
        both = [falsified(along(plan, of[plan.shape])) for of in known]
        for name in both[0]:
            seconds = statistics.fmean(lowered.time(of[name]).seconds for of in both)
            predicted.setdefault(name, []).append(seconds)
    return rows, predicted


class Verdict(NamedTuple):
    """For each size, the median relative error; and taus where there are enough plans.

    Attributes:
        taus: over pairs that are told apart, and over all.
    """

    errors: list[float]
    taus: list[tuple[float, float]]

    @property
    def passes(self) -> bool:
        return max(self.errors) <= MOST_ERROR and all(t >= LEAST_TAU for t, _ in self.taus)


def verdict(rows: Sequence[Found], predicted: Sequence[float]) -> Verdict:
    errors, taus = [], []
    for size in SIZES.values():
        of = [i for i, row in enumerate(rows) if row.plan.size == size]
        some, guesses = [rows[i] for i in of], [predicted[i] for i in of]
        relative = [abs(p / m.seconds - 1) for p, m in zip(guesses, some, strict=True)]
        errors.append(statistics.median(relative))
        if len(of) >= LEAST_PLANS:
            taus.append((tau(some, guesses, APART), tau(some, guesses, 0)))
    return Verdict(errors, taus)


def report(rows: Sequence[Found], predicted: Mapping[str, Sequence[float]]) -> tuple[str, bool]:
    """The tables, and whether the machine passes and all that are wrong fail."""
    names = {size: name for name, size in SIZES.items()}
    lines = [["step", "plan", "measured ms", "quartiles", "predicted ms", "error"]]
    for row, guess in zip(rows, predicted["as measured"], strict=True):
        spread = f"{1e3 * row.low:.1f}–{1e3 * row.high:.1f}"
        times = [f"{1e3 * row.seconds:.1f}", spread, f"{1e3 * guess:.1f}"]
        lines.append([names[row.plan.size], str(row.plan), *times, f"{guess / row.seconds - 1:+.0%}"])
    checks = [["machine", *(f"error {size}" for size in SIZES), "tau", "of all pairs", ""]]
    good = True
    for name, guesses in predicted.items():
        found = verdict(rows, guesses)
        good &= found.passes == (name == "as measured")
        shown = [", ".join(f"{t[k]:.2f}" for t in found.taus) for k in (0, 1)]
        result = "passes" if found.passes else "fails"
        checks.append([name, *(f"{error:.1%}" for error in found.errors), *shown, result])
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
