"""Tensor parallelism by torchard, by hand and by DTensor, timed in one run.

    python benchmarks/bench.py            two gloo ranks, one thread each; the table is saved in results/
    python benchmarks/bench.py --quick    smallest size, few rounds, nothing saved
    python benchmarks/bench.py --check    only check that all rivals compute the same

Before anything is timed, the output and every gradient of every rival are compared with one device
in float64.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import by_dtensor
import by_hand
import by_torchard
import overhead
import torch
import torch.distributed as dist
from timing import Timing, in_turns
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from workload import SHAPES, Problem, Rival, Shape, reference

from torchard import Mesh

RANKS = 2
RESULTS = Path(__file__).parent / "results"
# Of norm-wise relative errors, float32 against float64, through 16 matmuls.
TOLERANCE = 1e-5


def rivals_of(shape: Shape, mesh: Mesh, compiled: bool) -> list[Rival]:
    """All rivals, each with its own copies of the values."""
    problem = Problem.of(shape)
    return [
        *by_hand.rivals(problem),
        *by_dtensor.rivals(problem, mesh.device_mesh, compiled),
        *by_torchard.rivals(problem, mesh, compiled),
    ]


def errors_of(rivals: Sequence[Rival], shape: Shape) -> dict[str, float]:
    """The largest norm-wise relative error of each rival's output and gradients."""
    expected = reference(shape)
    errors = {}
    for rival in rivals:
        values = rival.whole(rival.run())
        if len(values) != len(expected):
            raise AssertionError(f"{rival.name}: {len(values)} values, not {len(expected)}")
        errors[rival.name] = max(map(_error, values, expected))
    return errors


def _error(value: Tensor, expected: Tensor) -> float:
    if value.shape != expected.shape:
        raise AssertionError(f"a value has shape {value.shape}, not {expected.shape}")
    return float((value.double() - expected).norm() / expected.norm())


# -- the table ------------------------------------------------------------------------------------


def table(timings: dict[Shape, list[Timing]]) -> str:
    """The table: at each size medians, quartiles, and the ratio to the best rival by hand."""
    head = ["milliseconds, forward + backward"]
    for shape in timings:
        head += [str(shape), "quartiles", "× hand"]
    rows = [head]
    for number, first in enumerate(next(iter(timings.values()))):
        row = [first.name]
        for at_size in timings.values():
            timing = at_size[number]
            low, high = (1e3 * q for q in timing.quartiles)
            ratio = timing.times(best_by_hand(at_size))
            row += [f"{1e3 * timing.median:.2f}", f"{low:.2f}–{high:.2f}", f"{ratio:.2f}"]
        rows.append(row)
    return aligned(rows)


def best_by_hand(timings: Sequence[Timing]) -> Timing:
    by_hand = [t for t in timings if t.name.startswith("by hand")]
    return min(by_hand, key=lambda t: t.median)


def aligned(rows: list[list[str]]) -> str:
    """The rows as a table; the first one is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.rjust(w) if i else c.ljust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def overheads(shape: Shape, mesh: Mesh) -> str:
    """The cost of planning and of cached calls, as text."""
    bare, lower, first = overhead.planning(shape, mesh)
    lines = [
        f"trace + plan, {shape.layers} layers with gradients: {1e3 * lower:.0f} ms "
        f"({lower / bare:.1f} × bare make_fx, {1e3 * bare:.0f} ms); first call {1e3 * first:.0f} ms",
        "",
    ]
    rows = [["overhead of a cached call, µs, by number of leaves"]]
    rows[0] += [str(n) for n in overhead.LEAVES] + ["fit"]
    for name, (points, a, b) in overhead.calls(mesh).items():
        fit = f"{1e6 * a:.1f} + {1e6 * b:.2f} per leaf"
        rows.append([name, *(f"{1e6 * t:.1f}" for t in points.values()), fit])
    compare, smallest = overhead.comparing(mesh)
    check = (
        f"the ranks' check of a call takes {1e6 * compare:.0f} µs; the smallest all_reduce takes "
        f"{1e6 * smallest:.0f} µs"
    )
    return "\n".join([*lines, aligned(rows), "", check])


def stored() -> str:
    """The cost of checksums when a single process saves and loads, as text."""
    saving, loading, checksum = overhead.storing()
    size = overhead.STORED / 1e6
    return (
        f"{size:.0f} MB saved in {1e3 * saving:.0f} ms and loaded in {1e3 * loading:.0f} ms, of which "
        f"the checksum takes {1e3 * checksum:.0f} ms each"
    )


def machine() -> str:
    """The date, the versions and the processor, as text."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = names[0].partition(": ")[2] if names else name
    return (
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{name}, {os.cpu_count()} cores; {RANKS} gloo ranks, 1 thread each"
    )


# -- the run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The sizes of a run, whether it has compiled rivals and is timed, and the file for its text."""

    shapes: tuple[Shape, ...]
    compiled: bool
    timed: bool
    save: Path | None


def measure(plan: Plan, mesh: Mesh) -> str:
    """Check and time the rivals; all results as one text."""
    timings, worst = {}, 0.0
    for shape in plan.shapes:
        note(f"{shape}: checking, compiling")
        rivals = rivals_of(shape, mesh, plan.compiled)
        errors = errors_of(rivals, shape)
        worst = max(worst, *errors.values())
        wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}
        if wrong:
            raise AssertionError(f"{shape}: not the values of one device: {wrong}")
        if plan.timed:
            note(f"{shape}: {shape.rounds} rounds")
            timings[shape] = in_turns(rivals, shape.rounds)
    agree = f"all rivals agree with one device in float64 to {worst:.1e}"
    if not plan.timed:
        return agree
    note("overheads")
    costs = overheads(plan.shapes[0], mesh)
    ratios = "× hand: against the best by hand, round by round; the median over all rounds"
    return "\n".join([machine(), agree, ratios, "", table(timings), "", costs])


def note(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"... {text}", file=sys.stderr, flush=True)


def work(rank: int, meeting: str, plan: Plan) -> None:
    """Run one rank of the benchmark."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    text = measure(plan, Mesh({"tp": RANKS}))
    if rank == 0:
        print(text, flush=True)
        if plan.save:
            plan.save.parent.mkdir(parents=True, exist_ok=True)
            plan.save.write_text(text + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smallest size, few rounds")
    parser.add_argument("--check", action="store_true", help="no timing, nothing compiled")
    parser.add_argument("--no-compile", action="store_true", help="without the compiled rivals")
    options = parser.parse_args()
    shapes: tuple[Shape, ...] = SHAPES
    if options.quick or options.check:
        shapes = (replace(SHAPES[0], rounds=30, layers=2 if options.check else 8),)
    compiled = not (options.check or options.no_compile)
    save = None
    if not options.quick and not options.check:
        save = RESULTS / f"{datetime.date.today()}-torch-{torch.__version__.split('+')[0]}.txt"
    plan = Plan(shapes, compiled, not options.check, save)
    # One thread per rank, also for compiling: Inductor starts as many processes as there are cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (f"{folder}/meeting", plan), nprocs=RANKS)
    if plan.timed:
        text = stored()
        print(text, flush=True)
        if plan.save:
            with plan.save.open("a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    main()
