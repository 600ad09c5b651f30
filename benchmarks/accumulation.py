"""Gradients of a GPT in slices of the batch: peaks, and times beside loops written by hand.

    python benchmarks/accumulation.py            12 layers, 16 rows; saved in results/
    python benchmarks/accumulation.py --quick    2 layers, 8 rows, nothing saved

Peaks are bytes of all live storages, including parameters, batch and gradients, after each operation of
an eager run. A loop by hand takes the gradients of each slice, by autograd, which adds them up in
``.grad``, or by torch.func.
"""

from __future__ import annotations

import argparse
import datetime
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
from bench import RESULTS, aligned, machine
from blocks import Model, gpt, train_gpt
from memory import Method as Row
from memory import check, in_one, kb, live_peak, timed
from torch import Tensor

from torchard import accumulate, jit

SLICES = (1, 2, 4, 8)


def by_backward(model: Model, slices: int) -> list[Tensor]:
    """The gradients that ``backward`` adds up in leaves."""
    leaves, structure = optree.tree_flatten(model.params)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    params: Any = optree.tree_unflatten(structure, leaves)
    for part in model.batch.chunk(slices):
        (model.loss(params, part) / slices).backward()
    return [leaf.grad for leaf in leaves]


def by_torch_func(model: Model, slices: int) -> list[Tensor]:
    """The gradients of each slice as a function, added up in place."""
    of = torch.func.grad(model.loss)
    total: list[Tensor] = []
    for part in model.batch.chunk(slices):
        found: list[Tensor] = optree.tree_leaves(of(model.params, part))
        if not total:
            total = [gradient.div_(slices) for gradient in found]
        else:
            for whole, gradient in zip(total, found, strict=True):
                whole.add_(gradient, alpha=1 / slices)
    return total


def inside(model: Model, slices: int) -> Row:
    """accumulate of a function that takes the gradients itself."""
    step = jit(accumulate(torch.func.grad(model.loss), slices, batch=(None, 0)), backend="eager")
    run = functools.partial(in_one, step, model)
    return Row(f"{slices}, gradients inside", run, step.lower(model.params, model.batch))


def outside(model: Model, slices: int) -> Row:
    """The gradient of an accumulated loss, whose backward computes the forward again."""
    loss = accumulate(model.loss, slices, batch=(None, 0))
    run = functools.partial(in_one, torch.func.grad(loss), model)
    joint = loss.lower_joint(model.params, model.batch, argnums=0)
    return Row(f"{slices}, gradients outside", run, joint)


def by_hand(name: str, run: Callable[[Model, int], list[Tensor]], model: Model, slices: int) -> Row:
    return Row(f"{slices}, {name}", functools.partial(run, model, slices))


def rows_of(model: Model) -> list[Row]:
    rows = [by_hand("backward()", by_backward, model, 1)]
    for slices in SLICES:
        rows += [inside(model, slices), outside(model, slices)]
        rows += [by_hand("backward() by hand", by_backward, model, slices)]
        rows += [by_hand("torch.func by hand", by_torch_func, model, slices)]
    return rows[1:]


def report(model: Model, rounds: int) -> str:
    rows = rows_of(model)
    check(rows, rows[0].run())
    timings = timed(rows, rounds)
    table = [[f"{model.name}: slices", "peak, kB", "simulated", "ms", "quartiles", "x by hand"]]
    for at, (row, timing) in enumerate(zip(rows, timings, strict=True)):
        simulated = "" if row.program is None else kb(row.program.peak)
        low, high = timing.quartiles
        hand = min(timings[at // 4 * 4 + 2 : at // 4 * 4 + 4], key=lambda rival: rival.median)
        cells = [kb(live_peak(row.run, model)), simulated, f"{1e3 * timing.median:.1f}"]
        spread = f"{1e3 * low:.1f} to {1e3 * high:.1f}"
        table.append([row.name, *cells, spread, f"{timing.times(hand):.2f}"])
    return aligned(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    layers, rows = (2, 8) if quick else (12, 16)
    model = gpt(train_gpt.Size(context=64, width=128, heads=4, layers=layers), rows=rows)
    title = machine().partition(";")[0] + f"; one process, {torch.get_num_threads()} thread"
    text = f"{title}\n\n{report(model, 3 if quick else 15)}"
    print(text)
    if not quick:
        version = torch.__version__.split("+")[0]
        RESULTS.mkdir(exist_ok=True)
        Path(RESULTS, f"{datetime.date.today()}-accumulation-torch-{version}.txt").write_text(text + "\n")


if __name__ == "__main__":
    main()
