"""Training steps of nine programs at three sizes: eager torch, torch.compile, jit, fuse, and jit of fuse.

    python benchmarks/steps.py                    all rows; the table is saved in results/
    python benchmarks/steps.py --quick            tiny models, few rounds, nothing saved
    python benchmarks/steps.py GPT "U-Net" ...    only these models, nothing saved
    python benchmarks/steps.py --sizes small,wide --systems eager,fuse    only these, nothing saved

A step is the loss, its gradients, and AdamW. Eager torch differentiates by autograd, and its optimizer is
torch's fused one; so is that of torch.compile, which compiles the loss. The others run one pure function,
which returns new parameters and is given the old ones' memory: `fuse` as Python, the others compiled by
Inductor. Before anything is timed, the first step of each system is compared with eager torch in float64.
"norms" has no products; "AdamW" is the update alone, of GPT's parameters, which torch.compile compiles.

Peaks are bytes of all live storages, parameters and batch included, by the profiler's memory events.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch
from bench import RESULTS, aligned, machine
from memory import profiled_peak
from step_models import MODELS, Model, Size
from timing import Timing, in_turns
from torch import Tensor
from workload import Rival

from torchard import fuse, jit, optim
from torchard.functional import torch_internals as internals
from torchard.kernels import release

RATE, DECAY = 1e-3, 0.01
# Of norm-wise errors against float64; a first step of Adam adds the sign of a gradient, however small.
TOLERANCE = 5e-2

SMALL, WIDE, LARGE = "small", "wide", "large"
IMAGES = {"ViT": 112, "U-Net": 32}
LARGEST = {
    "GPT": Size(2, 256, 16_384),
    "Llama": Size(2, 128, 32_768),
    "BERT": Size(2, 128, 30_522),
    "ViT": Size(2, 256, batch=8, length=224),
    "U-Net": Size(width=128, batch=2, length=128),
    "mixture of experts": Size(2, 128, 512, batch=2, length=2048),
    "Gemma 2": Size(2, 128, 16_384, batch=2, length=512),
    "norms": Size(2, 512, batch=1, length=16_384),
    "AdamW": Size(2, 256, 16_384),
}
# The rows whose time is mostly that of memory: large vocabularies, norms and scores of long sequences.
MEMORY_BOUND = {(name, LARGE) for name in ("GPT", "Llama", "BERT", "Gemma 2", "norms", "AdamW")}


def sizes_of(name: str, quick: bool) -> dict[str, Size]:
    if quick:
        return {"tiny": Size(1, 64, 64, batch=2, length=32)}
    length = IMAGES.get(name, 128)
    return {
        SMALL: Size(length=length),
        WIDE: Size(width=256, length=length),
        LARGE: LARGEST[name],
    }


# -- systems ----------------------------------------------------------------------------------------


@dataclass
class Step:
    """A system's step on its own copy of the parameters.

    Attributes:
        run: one step, which returns the loss.
        params: the present parameters.
        kernels: the names of the kernels that it runs.
    """

    run: Callable[[], Tensor]
    params: Callable[[], list[Tensor]]
    kernels: Callable[[], list[str]] = list


def copied(model: Model, dtype: torch.dtype = torch.float32) -> Model:
    """The model with parameters, and a floating batch, of its own in a dtype."""

    def copy(x: Tensor) -> Tensor:
        return x.detach().clone().to(dtype) if x.is_floating_point() else x

    return replace(
        model, params=optree.tree_map(copy, model.params), batch=tuple(map(copy, model.batch))
    )


def torchs(model: Model, wrapped: Callable[[Any], Any] | None = None) -> Step:
    """Autograd and torch's optimizer."""
    leaves = [x.requires_grad_() for x in optree.tree_leaves(model.params)]
    if model.loss is None:
        return torchs_update(leaves, model.batch, wrapped)
    optimizer = torch.optim.AdamW(leaves, RATE, weight_decay=DECAY, fused=True)
    loss_of = wrapped(model.loss) if wrapped else model.loss

    def run() -> Tensor:
        loss = loss_of(model.params, *model.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Step(run, lambda: [x.detach() for x in leaves])


def torchs_update(leaves: list[Tensor], grads: Sequence[Tensor], wrapped: Any) -> Step:
    """The optimizer alone: fused, or the operations of many tensors that a compiler fuses."""
    for x, grad in zip(leaves, grads, strict=True):
        x.grad = grad
    optimizer = torch.optim.AdamW(leaves, RATE, weight_decay=DECAY, fused=not wrapped)
    update = wrapped(optimizer.step) if wrapped else optimizer.step

    def run() -> Tensor:
        update()
        return torch.ones(())

    return Step(run, lambda: [x.detach() for x in leaves])


def train_of(model: Model) -> Callable[..., Any]:
    """The pure step."""
    optimizer = optim.adamw(RATE, weight_decay=DECAY)

    def update(params: Any, state: Any, *grads: Tensor) -> Any:
        tree = optree.tree_unflatten(optree.tree_structure(params), grads)
        return (*optimizer.update(tree, state, params), torch.ones(()))

    def train(params: Any, state: Any, *batch: Tensor) -> Any:
        grads, loss = torch.func.grad_and_value(model.loss)(params, *batch)
        return (*optimizer.update(grads, state, params), loss)

    return update if model.loss is None else train


def ours(model: Model, wrapped: Callable[[Any], Any]) -> Step:
    """A transformed step."""
    step = wrapped(train_of(model))
    held = [model.params, optim.adamw(RATE, weight_decay=DECAY).init(model.params)]
    batch = model.batch

    def run() -> Tensor:
        params, state = held
        held.clear()
        params, state, loss = step(params, state, *batch)
        held.extend((params, state))
        return loss

    def kernels() -> list[str]:
        uses = step.lower(*held, *batch).kernels
        return [str(use) for use in uses if not str(use.how).startswith("as written")]

    return Step(run, lambda: optree.tree_leaves(held[0]), kernels)


SYSTEMS: dict[str, Callable[[Model], Step]] = {
    "eager": torchs,
    "compile": lambda model: torchs(model, lambda fn: torch.compile(fn, dynamic=False)),
    "jit": lambda model: ours(model, lambda fn: jit(fn, donate_argnums=(0, 1))),
    "fuse": lambda model: ours(
        model, lambda fn: jit(fuse(fn), backend="eager", donate_argnums=(0, 1))
    ),
    "jit fuse": lambda model: ours(model, lambda fn: jit(fuse(fn), donate_argnums=(0, 1))),
}


def changes(model: Model, step: Step) -> list[Tensor]:
    """The loss of the first step, and what it adds to each parameter."""
    before = [x.detach().double() for x in optree.tree_leaves(model.params)]
    loss = step.run()
    after = [x.double() for x in step.params()]
    return [loss.double(), *(b - a for a, b in zip(before, after, strict=True))]


def error_of(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The norm-wise error of the loss, or of all changes together; Adam's first step has few digits."""
    loss = abs(float(values[0] - exact[0]) / float(exact[0]))
    wrong = sum(float((v - e).square().sum()) for v, e in zip(values[1:], exact[1:], strict=True))
    size = sum(float(e.square().sum()) for e in exact[1:])
    return max(loss, (wrong / size) ** 0.5)


def steps_of(name: str, model: Model, systems: Sequence[str]) -> dict[str, Step]:
    """The step of each system, after its first."""
    wide = copied(model, torch.float64)
    exact, steps = changes(model, torchs(wide)), {}
    for system in systems:
        note(f"{name}: {system}")
        began = time.perf_counter()
        mine = copied(model)
        steps[system] = step = SYSTEMS[system](mine)
        error = error_of(changes(model, step), exact)
        if not error <= TOLERANCE:
            raise AssertionError(f"{name}, {system}: off by {error:.1e}")
        note(f"    first step {time.perf_counter() - began:.1f} s, error {error:.1e}")
    return steps


# -- the table --------------------------------------------------------------------------------------


def note(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Row:
    """What was measured of one model at one size, and the kernels that were used."""

    name: str
    label: str
    size: str
    times: dict[str, Timing]
    peaks: dict[str, int]
    kernels: str


def row_of(name: str, label: str, size: Size, systems: Sequence[str], rounds: int) -> Row:
    torch.compiler.reset()
    model = MODELS[name](size)
    steps = steps_of(f"{name}, {size}", model, systems)
    rivals = [Rival(system, step.run, lambda _: []) for system, step in steps.items()]
    times = {t.name: t for t in in_turns(rivals, rounds)}
    peaks = {system: peak_of(step, model) for system, step in steps.items()}
    used = {system: Counter(step.kernels()) for system, step in steps.items()}
    kernels = [
        f"{system}: {', '.join(f'{kernel} × {n}' for kernel, n in counts.items())}"
        for system, counts in used.items()
        if counts
    ]
    return Row(name, label, str(size), times, peaks, "; ".join(kernels))


def peak_of(step: Step, model: Model) -> int:
    """Parameters and Adam's two moments count as arguments."""

    def fresh() -> Any:
        release()
        return step.run()

    held = 3 * sum(x.nbytes for x in optree.tree_leaves(model.params))
    return profiled_peak(fresh, held + sum(x.nbytes for x in model.batch))


def cells_of(row: Row) -> list[str]:
    cells = [f"{row.name}, {row.label}: {row.size}"]
    for timing in row.times.values():
        low, high = timing.quartiles
        cells.append(f"{1e3 * timing.median:.1f} ({1e3 * low:.1f}–{1e3 * high:.1f})")
    cells += [ratio(row.times, "eager", "fuse")]
    rivals = [row.times[s] for s in ("jit", "compile") if s in row.times]
    best = min(rivals, key=lambda t: t.median, default=None)
    cells += ["–" if best is None else ratio({**row.times, "best": best}, "best", "jit fuse")]
    cells += [ratio(row.times, "jit", "jit fuse")]
    return [*cells, *(f"{row.peaks[s] / 1e6:,.0f}" for s in row.times), row.kernels]


def ratio(times: dict[str, Timing], a: str, b: str) -> str:
    if a not in times or b not in times:
        return "–"
    low, high = times[a].quartiles_of_times(times[b])
    return f"{times[a].times(times[b]):.3f} ({low:.2f}–{high:.2f})"


def report(names: Sequence[str], labels: Sequence[str], systems: Sequence[str], options: Any) -> str:
    head = ["milliseconds", *systems, "eager / fuse", "best / jit fuse", "jit / jit fuse"]
    rows, measured = [[*head, *(f"MB, {system}" for system in systems), "kernels"]], list[Row]()
    for name in names:
        for label, size in sizes_of(name, options.quick).items():
            if labels and label not in labels:
                continue
            row = row_of(name, label, size, systems, options.rounds)
            measured.append(row)
            rows.append(cells_of(row))
            note("  ".join(rows[-1]))
            gc.collect()
    threads = torch.get_num_threads()
    title = machine().partition(";")[0] + f"; one process, {threads} thread{'s' * (threads > 1)}"
    legend = (
        "medians (quartiles) of wall-clock time; a / b: the median over rounds of the ratio in the same "
        "round, above 1 if b is faster\nbest: the faster of jit and torch.compile"
    )
    return f"{title}\n{legend}\n\n{aligned(rows)}\n\n{summary(measured)}"


def summary(rows: Sequence[Row]) -> str:
    """On how many rows the medians of the ratios are at least what is aimed at."""
    large = [row for row in rows if (row.name, row.label) in MEMORY_BOUND]

    def count(of: Sequence[Row], a: str, b: str, least: float) -> str:
        ratios = [row.times[a].times(row.times[b]) for row in of if {a, b} <= row.times.keys()]
        reached = sum(value >= least for value in ratios)
        return f"{a} / {b} is at least {least} on {reached} of {len(ratios)} rows"

    for row in rows:
        if {"jit", "compile"} <= row.times.keys():
            row.times["best"] = min(row.times["jit"], row.times["compile"], key=lambda t: t.median)
    lines = [count(rows, "eager", "fuse", 0.99), count(rows, "best", "jit fuse", 0.99)]
    lines += [
        f"{line}, of those bound by memory"
        for line in (count(large, "eager", "fuse", 1.15), count(large, "jit", "jit fuse", 1.05))
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these models: " + ", ".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="tiny models, few rounds")
    parser.add_argument("--sizes", default="", help="only these, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="only these, by commas")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    options = parser.parse_args()
    if unknown := set(options.names) - set(MODELS):
        parser.error(f"there is no model {', '.join(sorted(unknown))}")
    torch.set_num_threads(options.threads)
    internals.compile_in_this_process()
    # Importing the compiler warns about torch.jit.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    options.rounds = 3 if options.quick else options.rounds
    systems = [s for s in SYSTEMS if s in options.systems.split(",")]
    labels = [s for s in options.sizes.split(",") if s]
    text = report(options.names or list(MODELS), labels, systems, options)
    print(text)
    if not (options.quick or options.names or labels or len(systems) < len(SYSTEMS)):
        version = torch.__version__.split("+")[0]
        path = RESULTS / f"{datetime.date.today()}-steps-torch-{version}.txt"
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
