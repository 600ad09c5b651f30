"""Memory against time: one training step of a GPT under every policy, and under budgets of its peak.

    python examples/checkpointing.py
    python examples/checkpointing.py --layers 4 --rounds 3

The model is that of train_gpt.py, unchanged: `checkpoint` specifies from outside which blocks are
checkpointed and what they keep. Every step is run. Its gradients must equal those of the step without
checkpoints bit for bit, and its peak, measured storage by storage, must equal the peak that its program
predicts. A picture of peak against time is saved in out/.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import train_gpt
from _live import LiveBytes
from torch import Tensor

from torchard import checkpoint, jit, policies, random, tree
from torchard.functional.costs.flops import flops
from torchard.functional.engine.transformed import Transformed

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class Measurement:
    """The cost of a step under a policy.

    Attributes:
        residuals: bytes kept for the backward.
        peak: bytes at the peak.
        flops: FLOPs of recomputation.
    """

    policy: str
    residuals: int
    peak: int
    flops: int
    seconds: float


def save_attention(op: str, shapes: policies.Shapes, scope: str, name: str | None) -> bool:
    """A policy of one's own: save the results of attention, and recompute the rest."""
    return "scaled_dot_product" in op


def steps_of(size: train_gpt.Size, fractions: Sequence[float]) -> dict[str, Transformed]:
    """The gradient of the loss as one program: unchecked, under policies per block, and under budgets."""
    loss = functools.partial(train_gpt.loss, size)
    per_block: list[policies.Policy] = [
        policies.save_everything,
        policies.save_nothing,
        policies.save_dots,
        policies.save_names("stream"),
        policies.save_all_but_names("stream"),
        policies.offload_names("stream"),
        policies.save_names("stream") | save_attention,
    ]
    losses = {str(p): checkpoint(loss, where="block/*", policy=p) for p in per_block}
    budgets = [policies.budget(fraction=fraction) for fraction in fractions]
    losses |= {str(b): checkpoint(loss, policy=b) for b in budgets}
    # "eager" runs the generated code; "inductor" would take some seconds more for each.
    compiled = functools.partial(jit, backend="eager")
    return {
        "unchecked": compiled(torch.func.grad(loss)),
        **{name: compiled(torch.func.grad(checked)) for name, checked in losses.items()},
    }


def peak(step: Transformed, args: Sequence[Any]) -> int:
    """The most bytes alive at once during a step, arguments included."""
    gc.collect()
    with LiveBytes(tree.leaves(args)) as live:
        step(*args)
    return live.peak()


def medians(steps: Sequence[Transformed], args: Sequence[Any], rounds: int) -> list[float]:
    """Median seconds of each step, taken in turns, so that a disturbance affects all of them alike."""
    took: list[list[float]] = [[] for _ in steps]
    for _ in range(1 + rounds):  # the first round traces
        for step, seconds in zip(steps, took, strict=True):
            began = time.perf_counter()
            step(*args)
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds[1:]) for seconds in took]


def measure(steps: dict[str, Transformed], args: Sequence[Any], rounds: int) -> list[Measurement]:
    """Run every step for its gradients, for its peak, and in rounds for its time."""
    rows, expected = [], list[Tensor]()
    seconds = iter(medians(list(steps.values()), args, rounds))
    for name, step in steps.items():
        program = step.lower(*args)
        gradients = tree.leaves(step(*args))
        expected = expected or gradients
        assert all(map(torch.equal, gradients, expected)), f"{name}: not the unchecked gradients"
        del gradients
        measured = peak(step, args)
        assert measured == program.peak, f"{name}: {measured:,} bytes, not {program.peak:,}"
        recomputed = sum(flops(node) for node in program.calls if "recompute" in node.meta)
        rows.append(
            Measurement(name, program.residuals.bytes, measured, recomputed, next(seconds))
        )
    return rows


def table(rows: Sequence[Measurement]) -> str:
    lines = [f"{'policy':42}{'residuals':>12}{'peak, bytes':>14}{'recomp. MFLOP':>14}{'ms':>8}"]
    for row in rows:
        lines.append(
            f"{row.policy:42}{row.residuals:>12,}{row.peak:>14,}{row.flops / 1e6:>14,.2f}"
            f"{1e3 * row.seconds:>8.1f}"
        )
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[Measurement]) -> None:
    """Save a picture of peak memory against step time: the best rows are at the lower left."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    budgets = [row for row in rows if row.policy.startswith("budget")]
    others = [row for row in rows if row not in budgets]
    for group, style, label in ((others, "o", "policies"), (budgets, "s--", "budgets")):
        points = [(1e3 * row.seconds, row.peak / 1e6) for row in group]
        axes.plot(*zip(*points, strict=True), style, label=label)
    for row in rows:
        place = (1e3 * row.seconds, row.peak / 1e6)
        axes.annotate(row.policy, place, (4, 4), textcoords="offset points", fontsize=7)
    axes.set(xlabel="step, ms", ylabel="peak, MB", ylim=(0, None))
    axes.margins(x=0.2)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128, help="the width of the residual stream")
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11, help="how often each step is timed")
    parser.add_argument("--budgets", type=float, nargs="*", default=BUDGETS, help="their fractions")
    parser.add_argument("--out", type=Path, default=Path("out"))
    # More threads than free cores slow everything down: torch's threads spin while they wait.
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)

    size = train_gpt.Size(options.context, options.width, heads=4, layers=options.layers)
    shape = options.batch, options.context + 1
    args = train_gpt.init(size, random.key(0)), random.randint(random.key(1), shape, 0, 256)
    rows = measure(steps_of(size, options.budgets), args, options.rounds)
    print(
        f"{options.layers} layers, width {options.width}, {options.batch} × {options.context} bytes\n"
    )
    print(table(rows))

    peaks = {row.policy: row.peak for row in rows}
    assert peaks["save_nothing"] <= peaks["save_everything"] == peaks["unchecked"]
    bounds = [str(policies.budget(fraction=f)) for f in sorted(options.budgets, reverse=True)]
    under_budgets = [peaks[bound] for bound in bounds]
    assert under_budgets == sorted(under_budgets, reverse=True), "a smaller budget has a larger peak"
    path = options.out / "checkpointing.png"
    draw(path, rows)
    print(f"\nall gradients equal the unchecked step's, bit for bit; peak against time: {path}")


if __name__ == "__main__":
    main()
