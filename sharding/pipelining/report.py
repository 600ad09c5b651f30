"""The report of a pipeline: when each rank computes which tasks, how much it holds and how much it sends.

Read from the program as it is planned, so it shows the actual order, whatever schedule was requested.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchard.functional.costs.flops import flops
from torchard.functional.execution.profiler_ranges import WAIT
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import COLLECTIVE, PHASE, SCOPE, STEP
from torchard.functional.remat.liveness import liveness_of_ranks, order_of
from torchard.functional.reports.draw import figure_of
from torchard.sharding.layouts.collective_ops import Send
from torchard.sharding.layouts.tags import CHUNK
from torchard.sharding.lowering.work import operations_of
from torchard.sharding.pipelining.schedules import PipelineSchedule, Task, Timeline, timeline
from torchard.sharding.pipelining.tasks import is_whole, tasks_of
from torchard.sharding.values.mesh import Mesh

__all__ = ["PipelineReport", "StageReport", "report_of"]

_COLORS = {"F": "#7fa8d9", "B": "#d9a35f", "I": "#e6c07b", "W": "#a8c686"}
_NAMED = 4  # scopes of a stage that are written out


@dataclass(frozen=True)
class StageReport:
    """The work of the ranks of one stage in a call.

    Attributes:
        scopes: the scopes of its operations, in order.
        flops: the FLOPs of one rank.
        peak: the most bytes that a rank holds at once, as ``Lowered.peak``.
        sent: the bytes that a rank sends to each other stage.
    """

    scopes: tuple[str, ...]
    flops: int
    peak: int
    sent: Mapping[int, int]


@dataclass(frozen=True)
class PipelineReport:
    """When each rank of a pipeline computes which tasks.

    Attributes:
        axis: the mesh axis of the stages.
        schedule: the tasks of each stage, in the order of the program.
        flops: the FLOPs of each task, on one rank.
        stages: the work of the ranks of each stage.

    >>> import torch, torchard as ta
    >>> def mlp(params, x):
    ...     for i, w in enumerate(params):
    ...         with ta.scope(f"layer/{i}"):
    ...             x = torch.relu(x @ w)
    ...     return x.sum()
    >>> mesh = ta.Mesh({"pp": 2}, virtual=True)
    >>> step = ta.pipeline(torch.func.grad(mlp), mesh, "pp", microbatches=3, batch=(None, 0))
    >>> print(step.lower([torch.ones(8, 8)] * 4, torch.ones(6, 8)).schedule)
    1f1b on pp, 3 microbatches: bubble 33% with equal tasks, 29% by FLOPs
    rank 0  F0 F1       B0    F2 B1       B2
    rank 1     F0 B0    F1 B1    F2 B2
    stage  scopes            FLOPs  in flight  peak bytes  bytes sent
    -----  ----------------  -----  ---------  ----------  ----------
    pp=0   layer/0, layer/1  4,288          2       2,560    192 to 1
    pp=1   layer/2, layer/3  5,057          1       2,500    192 to 0
    """

    axis: str
    schedule: PipelineSchedule
    flops: Mapping[Task, int]
    stages: tuple[StageReport, ...]

    def timeline(self, seconds: Mapping[Task, float] | None = None) -> Timeline:
        """When each task starts and ends; communication takes no time.

        Args:
            seconds: how long each task takes; by default, its FLOPs.
        """
        costs = self.flops if seconds is None else seconds
        return timeline(self.schedule, lambda task: costs.get(task, 0))

    def measured(self, profile: torch.profiler.profile) -> dict[Task, float]:
        """How long each task took in a call, in seconds, by a profile; as the mean over calls.

        Waits for other ranks are not counted. Over process groups a rank's profile has the tasks of that
        rank; with those of all ranks together, `timeline` predicts how long a call takes.

        Args:
            profile: a finished profile of calls of the pipeline.
        """
        named = {str(task): task for tasks in self.schedule.ranks for task in tasks}
        seconds: Counter[Task] = Counter()
        calls: set[int] = set()
        for event in profile.events() or ():
            within, took = event, event.time_range.elapsed_us() / 1e6
            if event.name.startswith(WAIT):
                within, took = _outer(event, named), -took
            if within is not None and within.name in named:
                seconds[named[within.name]] += took
                calls.add(id(within.cpu_parent))
        return {task: total / len(calls) for task, total in seconds.items()}

    def __str__(self) -> str:
        head, *ranks = str(self.schedule).splitlines()
        equal = head.partition("bubble ")[2].partition(",")[0]
        count = self.schedule.microbatches
        return "\n".join(
            [
                f"{self.schedule.name} on {self.axis}, {count} microbatches: "
                f"bubble {equal} with equal tasks, {self.timeline().bubble:.0%} by FLOPs",
                *ranks,
                _table(self.axis, self.stages, self.timeline().in_flight),
            ]
        )

    def draw(
        self, path: str | os.PathLike[str], seconds: Mapping[Task, float] | None = None
    ) -> Path:
        """Draw the tasks of each stage over time.

        Args:
            path: the file, whose suffix (svg, pdf, png) is the format.
            seconds: how long each task takes; by default, its FLOPs.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        run = self.timeline(seconds)
        stages = len(self.stages)
        with figure_of(9.0, 0.6 + 0.4 * stages) as figure:
            axes = figure.add_axes((0.08, 0.15, 0.9, 0.7))
            for rank, tasks in enumerate(self.schedule.ranks):
                for task in tasks:
                    self._bar(axes, rank, task, run)
            axes.set_yticks(range(stages), [f"{self.axis}={rank}" for rank in range(stages)])
            axes.set_ylim(stages - 0.5, -0.5)
            axes.set_xlim(0, run.length)
            axes.set_xticks([])
            axes.set_xlabel("FLOPs" if seconds is None else f"{run.length:.3g} s")
            axes.set_title(f"{self.schedule.name}: bubble {run.bubble:.0%}", loc="left", fontsize=9)
            figure.savefig(path)
        return Path(path)

    def _bar(self, axes: Any, rank: int, task: Task, run: Timeline) -> None:
        begin, width = run.starts[task], run.ends[task] - run.starts[task]
        axes.barh(
            rank, width, left=begin, height=0.8, color=_COLORS[task.kind], edgecolor="white", lw=0.5
        )
        if width > run.length / 100:
            text = f"{task.microbatch}"
            axes.text(begin + width / 2, rank, text, ha="center", va="center", fontsize=6)


def _outer(event: Any, names: Collection[str]) -> Any:
    """The event of one of these names that a profile's event is in; None if it is in none."""
    while event is not None and event.name not in names:
        event = event.cpu_parent
    return event


def _table(axis: str, stages: Sequence[StageReport], in_flight: Sequence[int]) -> str:
    rows = [("stage", "scopes", "FLOPs", "in flight", "peak bytes", "bytes sent")]
    for rank, (stage, most) in enumerate(zip(stages, in_flight, strict=True)):
        sent = ", ".join(f"{count:,} to {to}" for to, count in sorted(stage.sent.items())) or "0"
        scopes = _shortened(stage.scopes)
        rows.append(
            (f"{axis}={rank}", scopes, f"{stage.flops:,}", str(most), f"{stage.peak:,}", sent)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            [
                *map(str.ljust, row[:2], widths[:2]),
                *map(str.rjust, row[2:], widths[2:]),
            ]
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _shortened(scopes: Sequence[str]) -> str:
    if len(scopes) <= _NAMED:
        return ", ".join(scopes)
    return ", ".join([*scopes[: _NAMED // 2], "...", *scopes[-(_NAMED // 2) :]])


def report_of(program: Program, mesh: Mesh, axis: str, wanted: PipelineSchedule) -> PipelineReport:
    """The report of a program that is planned over a mesh.

    Args:
        wanted: the schedule in whose order the program was put.
    """
    tasks, places = tasks_of(program.graph, is_whole(wanted)), wanted.rank_of_chunk
    ranks: list[dict[Task, None]] = [{} for _ in wanted.ranks]
    for node in order_of(program):
        if node in tasks:
            ranks[places[tasks[node].chunk]].setdefault(tasks[node])
    costs: Counter[Task] = Counter()
    scopes: list[dict[str, None]] = [{} for _ in wanted.ranks]
    totals = [0] * len(ranks)
    for operation in operations_of(program.graph, mesh):
        node, cost = operation.whole, flops(operation.local)
        task, rank = tasks.get(node), dict(operation.home).get(axis, 0)
        totals[rank] += cost
        if task is not None:
            costs[task] += cost
        if CHUNK.on(node) and PHASE.get(node) != "backward" and SCOPE.get(node):
            scopes[rank].setdefault(_layer(SCOPE.of(node)))
    sent = _sent(program.graph, len(ranks))
    stages = [
        StageReport(tuple(scopes[rank]), totals[rank], peak, sent[rank])
        for rank, peak in enumerate(_peaks(program, len(ranks)))
    ]
    schedule = replace(wanted, ranks=tuple(map(tuple, ranks)))
    return PipelineReport(axis, schedule, costs, tuple(stages))


def _layer(scope: str) -> str:
    """A scope up to the first number: one layer."""
    parts = scope.split("/")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return "/".join(parts[: numbered + 1])


def _peaks(program: Program, count: int) -> list[int]:
    peaks = [live.peak for live in liveness_of_ranks(program)]
    return peaks if len(peaks) == count else peaks[:1] * count


def _sent(graph: fx.Graph, count: int) -> list[Counter[int]]:
    """The bytes that a rank of each stage sends to each other one."""
    sent: list[Counter[int]] = [Counter() for _ in range(count)]
    for node in graph.nodes:
        op = STEP.of(node).collective if STEP.on(node) else None
        if isinstance(op, Send) and COLLECTIVE.on(node) and op.source is not None:
            for to in range(count) if op.to is None else (op.to,):
                if to != op.source:
                    sent[op.source][to] += COLLECTIVE.of(node).bytes
    return sent
