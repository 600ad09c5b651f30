"""Memory against time: one training step of a GPT under every policy, and under budgets of its peak.

    python examples/checkpointing.py
    python examples/checkpointing.py --layers 4 --rounds 3

The model is train_gpt.py's, and does not change: that its blocks are checkpointed, and what they keep, is
said beside it. Every step is run for real: its gradients are those of the unchecked step bit for bit, its
peak is counted from outside, storage by storage, and is what the program said before it ran. A picture of
peak against time is left in out/.
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
from torchard.functional.engine.transformed import Transformed
from torchard.functional.programs.flops import flops

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


@dataclass(frozen=True)
class Found:
    """What a step under a policy took: bytes kept for the backward, bytes at the peak, FLOPs, seconds."""

    policy: str
    residuals: int
    peak: int
    flops: int
    seconds: float


def save_attention(op: str, shapes: policies.Shapes, scope: str, name: str | None) -> bool:
    """A policy is a function of these: here, the attention itself and nothing around it."""
    return "scaled_dot_product" in op


def steps_of(size: train_gpt.Size, fractions: Sequence[float]) -> dict[str, Transformed]:
    """The gradient of the loss, as one program: unchecked, by policies block by block, and by budgets."""
    loss = functools.partial(train_gpt.loss, size)
    chosen: list[policies.Policy] = [
        policies.save_everything,
        policies.save_nothing,
        policies.save_dots,
        policies.save_names("stream"),
        policies.save_all_but_names("stream"),
        policies.offload_names("stream"),
        policies.save_names("stream") | save_attention,
    ]
    losses = {str(p): checkpoint(loss, where="block/*", policy=p) for p in chosen}
    budgets = [policies.budget(fraction=fraction) for fraction in fractions]
    losses |= {str(b): checkpoint(loss, policy=b) for b in budgets}
    # The generated code runs as it is; the compiler takes some seconds more for each.
    compiled = functools.partial(jit, backend="eager")
    return {
        "unchecked": compiled(torch.func.grad(loss)),
        **{name: compiled(torch.func.grad(each)) for name, each in losses.items()},
    }


def peak(step: Transformed, args: Sequence[Any]) -> int:
    """Bytes alive at once during a step, the arguments among them."""
    gc.collect()
    with LiveBytes(tree.leaves(args)) as count:
        step(*args)
    return count.peak()


def medians(steps: Sequence[Transformed], args: Sequence[Any], rounds: int) -> list[float]:
    """Seconds of each step; in turns, so that what disturbs one disturbs all. The first round traces."""
    took: list[list[float]] = [[] for _ in steps]
    for _ in range(1 + rounds):
        for step, seconds in zip(steps, took, strict=True):
            began = time.perf_counter()
            step(*args)
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds[1:]) for seconds in took]


def measure(steps: dict[str, Transformed], args: Sequence[Any], rounds: int) -> list[Found]:
    """Every step once for its gradients, once for its peak, and in rounds for its time."""
    found, expected = [], list[Tensor]()
    seconds = iter(medians(list(steps.values()), args, rounds))
    for name, step in steps.items():
        program = step.lower(*args)
        slopes = tree.leaves(step(*args))
        expected = expected or slopes
        assert all(map(torch.equal, slopes, expected)), f"{name}: not the unchecked gradients"
        del slopes
        measured = peak(step, args)
        assert measured == program.peak, f"{name}: {measured:,} bytes, not {program.peak:,}"
        again = sum(flops(node) for node in program.calls if "recompute" in node.meta)
        found.append(Found(name, program.residuals.bytes, measured, again, next(seconds)))
    return found


def table(found: Sequence[Found]) -> str:
    lines = [f"{'policy':42}{'residuals':>12}{'peak, bytes':>14}{'again, MFLOP':>14}{'ms':>8}"]
    for row in found:
        lines.append(
            f"{row.policy:42}{row.residuals:>12,}{row.peak:>14,}{row.flops / 1e6:>14,.2f}"
            f"{1e3 * row.seconds:>8.1f}"
        )
    return "\n".join(lines)


def draw(path: Path, found: Sequence[Found]) -> None:
    """Peak memory against step time: what lies below and to the left of all others is worth taking."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    budgets = [row for row in found if row.policy.startswith("budget")]
    others = [row for row in found if row not in budgets]
    for rows, style, label in ((others, "o", "policies"), (budgets, "s--", "budgets")):
        points = [(1e3 * row.seconds, row.peak / 1e6) for row in rows]
        axes.plot(*zip(*points, strict=True), style, label=label)
    for row in found:
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
    parser.add_argument("--width", type=int, default=128, help="of the residual stream")
    parser.add_argument("--context", type=int, default=64, help="bytes in a window")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=11, help="how often each step is timed")
    parser.add_argument("--budgets", type=float, nargs="*", default=BUDGETS, help="fractions")
    parser.add_argument("--out", type=Path, default=Path("out"))
    # More threads than free cores cost far more than they bring: torch's threads spin while waiting.
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)

    size = train_gpt.Size(options.context, options.width, heads=4, layers=options.layers)
    shape = options.batch, options.context + 1
    args = train_gpt.init(size, random.key(0)), random.randint(random.key(1), shape, 0, 256)
    found = measure(steps_of(size, options.budgets), args, options.rounds)
    print(
        f"{options.layers} layers, width {options.width}, {options.batch} × {options.context} bytes\n"
    )
    print(table(found))

    peaks = {row.policy: row.peak for row in found}
    assert peaks["save_nothing"] <= peaks["save_everything"] == peaks["unchecked"]
    bounds = [str(policies.budget(fraction=f)) for f in sorted(options.budgets, reverse=True)]
    falling = [peaks[bound] for bound in bounds]
    assert falling == sorted(falling, reverse=True), "less of a budget is never more of a peak"
    path = options.out / "checkpointing.png"
    draw(path, found)
    print(f"\nall gradients are the unchecked step's, bit for bit; peak against time: {path}")


if __name__ == "__main__":
    main()
