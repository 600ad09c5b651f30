"""Pipelines of a GPT's blocks over two and four ranks, by torchard and by torch.distributed.pipelining.

    python benchmarks/pipelines.py            two and four gloo ranks; the table is saved in results/
    python benchmarks/pipelines.py --quick    two ranks, the smaller size, few rounds, nothing saved
    python benchmarks/pipelines.py --check    only check that all rivals compute the same

Beside each time of torchard is the time that the drawn schedule predicts from measured times of tasks, by
a profile of each rank, and how long the profiled steps took, which is longer by what a profile costs. In
the prediction communication takes no time, and every rank has a core of its own.

A step is the loss and the gradients of all parameters, from a batch that every rank has. All rivals run
the same functions of a block, with as many blocks on every rank; the embedding is on the first rank, the
head and the loss on the last. Before anything is timed, the loss and every gradient of every rival are
compared with one device in float64.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optree
import torch
import torch.distributed as dist
from bench import RESULTS, TOLERANCE, aligned, machine, note
from blocks import train_gpt
from timing import Timing, in_turns
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.multiprocessing.spawn import spawn
from workload import Rival

from torchard import Mesh, MeshTensor, P, pipeline, place, random

MICROBATCHES = 8


@dataclass(frozen=True)
class Shape:
    """The sizes of the workload, and the number of rounds in which rivals are timed."""

    size: train_gpt.Size
    rows: int
    rounds: int

    def __str__(self) -> str:
        s = self.size
        return f"{s.layers} layers, width {s.width}, {self.rows}×{s.context}"

    def values(self) -> tuple[Any, Tensor]:
        """The parameters and the batch of windows, int64 [rows, context + 1]."""
        params = train_gpt.init(self.size, random.key(0))
        batch = random.randint(random.key(1), (self.rows, self.size.context + 1), 0, 256)
        return params, batch


def _size(width: int, context: int, layers: int = 8) -> train_gpt.Size:
    return train_gpt.Size(context, width, 4, layers, tied=False)


SHAPES = (Shape(_size(64, 32), 32, 60), Shape(_size(128, 64), 64, 30), Shape(_size(256, 128), 32, 10))


# -- torchard ---------------------------------------------------------------------------------------


def by_torchard(shape: Shape, mesh: Mesh, schedule: str) -> Rival:
    params, batch = shape.values()
    loss = functools.partial(train_gpt.loss, shape.size)
    step = pipeline(
        torch.func.grad_and_value(loss),
        mesh,
        "pp",
        stages="block/*",
        microbatches=MICROBATCHES,
        batch=(None, 0),
        schedule=schedule,
    )
    held = place(params, mesh, specs(shape.size, mesh.shape["pp"]))

    def whole(result: Any) -> list[Tensor]:
        grads, value = result
        return [v.full() if isinstance(v, MeshTensor) else v for v in optree.tree_leaves((value, grads))]

    report = step.lower(held, batch).schedule
    return Pipelined(f"torchard, {schedule}", lambda: step(held, batch), whole, report)


@dataclass(frozen=True)
class Pipelined(Rival):
    """A pipeline of torchard's, with its report."""

    report: Any

    def predicted(self, calls: int = 8) -> tuple[float, float]:
        """The seconds of a step by the drawn schedule, with measured times of its tasks, and in truth.

        Both are of the same profiled steps; a step lasts until the last rank has ended it.
        """
        seconds = 0.0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(calls):
                dist.barrier()
                began = time.perf_counter()
                self.run()
                seconds += (time.perf_counter() - began) / calls
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self.report.measured(profile), seconds))
        tasks = {task: t for measured, _ in found for task, t in measured.items()}
        return float(self.report.timeline(tasks).length), max(seconds for _, seconds in found)


def specs(size: train_gpt.Size, ranks: int) -> Any:
    first, last = P().at(pp=0), P().at(pp=ranks - 1)
    return {
        "embedding": first,
        "positions": first,
        "blocks": [P().at(pp=i * ranks // size.layers) for i in range(size.layers)],
        "norm": last,
        "head": last,
    }


# -- torch.distributed.pipelining -------------------------------------------------------------------


class Stage(nn.Module):
    """The blocks of a rank: of the first, after the embedding; of the last, before the head."""

    def __init__(self, size: train_gpt.Size, params: Any, rank: int, ranks: int) -> None:
        super().__init__()
        self.size, self.first, self.last = size, rank == 0, rank == ranks - 1
        each = size.layers // ranks
        mine = {"blocks": params["blocks"][rank * each : (rank + 1) * each]}
        ends = ["embedding", "positions"] * self.first + ["norm", "head"] * self.last
        self.tree = optree.tree_map(nn.Parameter, {**mine, **{k: params[k] for k in ends}})
        self.leaves = nn.ParameterList(optree.tree_leaves(self.tree))

    def forward(self, x: Tensor) -> Tensor:
        p = self.tree
        if self.first:
            x = nn.functional.embedding(x, p["embedding"]) + p["positions"]
        for block in p["blocks"]:
            x = x + train_gpt.attention(self.size, block, train_gpt.norm(block["norm1"], x))
            x = x + train_gpt.mlp(block, train_gpt.norm(block["norm2"], x))
        return nn.functional.linear(train_gpt.norm(p["norm"], x), p["head"]) if self.last else x


def by_pytorch(shape: Shape, name: str, kind: Callable[..., Any]) -> Rival:
    params, batch = shape.values()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = Stage(shape.size, params, rank, ranks)
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    schedule = kind(stage, MICROBATCHES, loss_fn=loss)
    x, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def run() -> list[Tensor]:
        module.zero_grad()
        losses: list[Tensor] = []
        if rank == 0 == ranks - 1:
            schedule.step(x, target=labels, losses=losses)
        elif rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step()
        return losses

    def whole(losses: list[Tensor]) -> list[Tensor]:
        value = torch.stack(losses).mean().detach() if losses else None
        grads = optree.tree_map(lambda leaf: leaf.grad, module.tree)
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, (value, grads))
        tree = {key: value for _, part in found for key, value in part.items() if key != "blocks"}
        tree["blocks"] = [block for _, part in found for block in part["blocks"]]
        return [found[-1][0], *optree.tree_leaves(tree)]

    return Rival(f"torch.distributed.pipelining, {name}", run, whole)


# -- the run ----------------------------------------------------------------------------------------


def rivals_of(shape: Shape, mesh: Mesh) -> list[Rival]:
    return [
        by_pytorch(shape, "GPipe", ScheduleGPipe),
        by_pytorch(shape, "1F1B", Schedule1F1B),
        *(by_torchard(shape, mesh, schedule) for schedule in ("gpipe", "1f1b", "zb-h1")),
    ]


def check(rivals: list[Rival], shape: Shape) -> float:
    """The largest norm-wise relative error of a rival's loss and gradients."""
    params, batch = shape.values()
    params = optree.tree_map(lambda p: p.double(), params)
    loss = functools.partial(train_gpt.loss, shape.size)
    grads, value = torch.func.grad_and_value(loss)(params, batch)
    expected, worst = optree.tree_leaves((value, grads)), 0.0
    for rival in rivals:
        found = rival.whole(rival.run())
        for value, want in zip(found, expected, strict=True):
            error = float((value.double() - want).norm() / want.norm().clamp(min=1e-12))
            if not error <= TOLERANCE:
                raise AssertionError(f"{rival.name}: not the values of one device: {error:.1e}")
            worst = max(worst, error)
    return worst


def table(rivals: list[Rival], timings: list[Timing]) -> str:
    """Medians and quartiles, the ratio to each rival of PyTorch's, round by round, and the prediction."""
    theirs = [t for t in timings if not t.name.startswith("torchard")]
    ratios = [f"× {t.name.split(', ')[1]}" for t in theirs]
    rows = [["milliseconds a step", "median", "quartiles", *ratios, "predicted", "profiled", "error"]]
    for rival, timing in zip(rivals, timings, strict=True):
        low, high = (1e3 * q for q in timing.quartiles)
        ratios = [f"{timing.times(other):.2f}" for other in theirs]
        spread = f"{low:.1f}–{high:.1f}"
        rows.append([timing.name, f"{1e3 * timing.median:.1f}", spread, *ratios, "", "", ""])
        if isinstance(rival, Pipelined):
            rival.predicted()  # what a profile runs is compiled by the first call
            predicted, profiled = rival.predicted()
            error = f"{predicted / profiled - 1:+.0%}"
            rows[-1][-3:] = [f"{1e3 * predicted:.1f}", f"{1e3 * profiled:.1f}", error]
    return aligned(rows)


def work(rank: int, meeting: str, ranks: int, shapes: tuple[Shape, ...], timed: bool) -> None:
    """Run one rank of the benchmark."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = Mesh({"pp": ranks})
    for shape in shapes:
        note(f"{ranks} ranks, {shape}")
        rivals = rivals_of(shape, mesh)
        worst = check(rivals, shape)
        text = f"{ranks} ranks, {shape}, {MICROBATCHES} microbatches; errors up to {worst:.1e}\n"
        if timed:
            text += table(rivals, in_turns(rivals, shape.rounds)) + "\n"
        if rank == 0:
            with Path(meeting + ".text").open("a") as file:
                file.write(text + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two ranks, the smaller size, few rounds")
    parser.add_argument("--check", action="store_true", help="no timing")
    parser.add_argument("--ranks", type=int, nargs="*", default=(2, 4))
    parser.add_argument("--shapes", type=int, nargs="*", default=tuple(range(len(SHAPES))))
    options = parser.parse_args()
    shapes = tuple(SHAPES[i] for i in options.shapes)
    ranks = options.ranks
    if options.quick:
        shapes, ranks = SHAPES[:1], (2,)
    with tempfile.TemporaryDirectory() as folder:
        for count in ranks:
            meeting = f"{folder}/meeting{count}"
            spawn(work, (meeting, count, shapes, not options.check), count)
        text = "\n".join([machine(), "", *(Path(f"{folder}/meeting{n}.text").read_text() for n in ranks)])
    print(text)
    if not (options.quick or options.check) and len(shapes) == len(SHAPES):
        RESULTS.mkdir(exist_ok=True)
        name = f"{datetime.date.today()}-pipelines-torch-{torch.__version__.split('+')[0]}.txt"
        (RESULTS / name).write_text(text + "\n")


if __name__ == "__main__":
    main()
