"""The time of a program on a machine: how long it takes, and where communication is exposed."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from torchard.functional.costs.flops import flops, is_product, op_name
from torchard.functional.costs.seconds import seconds_of
from torchard.functional.execution.sequencing import RankList
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import Record, Records, titled_table
from torchard.functional.programs.tags import COLLECTIVE, SCOPE, SOURCE, TASK, VAL
from torchard.functional.reports.clock import COMPUTE, Interval, RankTimeline, timelines
from torchard.functional.reports.work import work_of

__all__ = ["Exposed", "Time", "check_links", "duration", "time_of"]


@dataclass(frozen=True)
class Exposed(Record):
    """Communication that computation waits for.

    Attributes:
        record: what is sent.
        source, scope: the source line and scope of the operation that needs it.
        seconds: how long computation waits, in all iterations; ``sent``: how long sending takes.
        times: the number of times.
        rank: the coordinate of the rank that waits along a pipeline's axis.
    """

    record: Record
    source: str
    scope: str
    seconds: float
    sent: float
    times: int
    rank: int = 0

    @classmethod
    def table(cls, records: Sequence[Exposed]) -> str:
        rows: list[tuple[str, ...]] = [
            ("exposed", "sent", "times", "collective", "source", "scope", "rank")
        ]
        rows += [
            (
                *map(duration, (r.seconds, r.sent)),
                *map(str, (r.times, r.record, r.source, r.scope, r.rank)),
            )
            for r in records
        ]
        if not any(r.rank for r in records):
            rows = [row[:-1] for row in rows]
        return titled_table(rows)

    def __str__(self) -> str:
        return f"{duration(self.seconds)} of {self.record} at {self.source}"


@dataclass(frozen=True)
class Time:
    """The predicted time of a program on a mesh's ranks.

    Attributes:
        machine: the machine whose rates are used.
        seconds: from the first operation to the last, or to the end of the last collective.
        computing: seconds in which a rank computes; of a pipeline, the rank that computes longest.
        flops: FLOPs of a rank's products; of a pipeline, their mean over the ranks.
        exposed: the communication that computation waits for, by line, the longest first.
        timelines: what runs when: of one rank, or of one of each stage of a pipeline.
    """

    machine: Machine
    seconds: float
    computing: float
    flops: float
    exposed: Records
    timelines: tuple[RankTimeline, ...]

    @property
    def share(self) -> float:
        """The ranks' FLOPs per second, as a share of the machine's fastest rate."""
        return self.flops / max(self.seconds, 1e-30) / max(self.machine.flops.values())

    @property
    def bubble(self) -> float:
        """The time that the busiest rank does not compute, relative to the time that it does."""
        return self.seconds / self.computing - 1 if self.computing else 0.0

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace that chrome://tracing and Perfetto show: each rank's computation and links."""
        out = Path(path)
        events = [e for rank, run in enumerate(self.timelines) for e in _events(rank, run)]
        out.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
        return out

    def __str__(self) -> str:
        head = f"{duration(self.seconds)} on {self.machine.name}: computes {duration(self.computing)}"
        if len(self.timelines) > 1:
            head += f" on the busiest of {len(self.timelines)} stages, bubble {self.bubble:.0%}"
        else:
            head += f", waits {duration(sum(each.seconds for each in self.exposed))}"
        head += f"; {self.share:.1%} of its FLOPs"
        return f"{head}\n\n{self.exposed}" if self.exposed else head


def check_links(program: Program, machine: Machine) -> None:
    """Check that a machine whose links are of axes has one for an axis of the program, if it sends.

    On a machine with a ``link`` of all other axes, there is one for any axis.

    Raises:
        ValueError: it has none; names the axes of both.
    """
    named = {key.partition("/")[0] for key in machine.links}
    if not named or machine.link.seconds(1) > 0:
        return
    sent = {axis for record in program.collectives for axis in record.over(machine)[0]}
    if sent <= named:
        return
    axes = {each.axis for each in work_of(program).axes}
    if axes.isdisjoint(named):
        raise ValueError(
            f"time: machine {machine.name!r} has links for {_names(named)}, and the program sends along "
            f"{_names(sent)}, on a mesh with the axes {_names(axes)}: sending would take no time. Name "
            "the links as the mesh names its axes, or give Machine(link=...) for all other axes."
        )


def _names(axes: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(axes)))


def time_of(lists: Sequence[RankList], machine: Machine) -> Time:
    """The time on a machine of what ranks run: one of a mesh's, or one of each stage.

    Raises:
        PipelineError: the ranks wait for each other.
    """
    costs = [_Costs(listed, machine) for listed in lists]
    runs = timelines(lists, machine, [each.seconds for each in costs])
    return Time(
        machine,
        max(run.end for run in runs),
        max(sum(each.end - each.begin for each in run.computing) for run in runs),
        sum(each.flops for each in costs) / len(runs),
        Records(sorted(_exposed(runs), key=lambda each: -each.seconds)),
        tuple(runs),
    )


class _Costs:
    """The costs of one rank's operations, by the values that it holds."""

    def __init__(self, listed: RankList, machine: Machine) -> None:
        for node, value in (listed.values or {}).items():
            VAL.set(node, value)
        self.listed, self.machine = listed, machine
        self.flops = 0  # of products so far, whose seconds a machine may not count

    def seconds(self, node: fx.Node) -> float:
        """The seconds of an operation that the rank runs next."""
        self.flops += flops(node) if is_product(node) else 0
        return seconds_of(node, self.machine, self.listed.runs.nodes.get(node))


def _exposed(runs: Sequence[RankTimeline]) -> Iterator[Exposed]:
    """Waits by rank, source line and collective."""
    for rank, run in enumerate(runs):
        waited: defaultdict[tuple[str, str, str], list[Interval]] = defaultdict(list)
        sent: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        for each in run.intervals:
            if COLLECTIVE.on(each.node) and (each.waits or each.stream != COMPUTE):
                record = COLLECTIVE.of(each.node)
                key = str(record), SOURCE.get(each.node) or "", SCOPE.get(each.node, "")
                if each.waits:
                    waited[key].append(each)
                else:
                    sent[key] += each.end - each.begin
        for key, waits in waited.items():
            record, seconds = COLLECTIVE.of(waits[0].node), sum(x.end - x.begin for x in waits)
            yield Exposed(record, *key[1:], seconds, sent[key], len(waits), rank)


def _events(rank: int, run: RankTimeline) -> Iterator[dict[str, object]]:
    """A rank's events in the Trace Event Format: its streams' names, then what runs, in microseconds."""
    streams = list(dict.fromkeys([COMPUTE, *(each.stream for each in run.intervals)]))
    yield _named("process_name", rank, 0, f"rank {rank}")
    for number, stream in enumerate(streams):
        yield _named("thread_name", rank, number, "·".join(stream) or "compute")
    for each in run.intervals:
        about = {"source": SOURCE.get(each.node) or "", "scope": SCOPE.get(each.node, "")}
        if TASK.on(each.node):
            about["task"] = TASK.of(each.node)
        yield {
            "name": f"wait for {COLLECTIVE.of(each.node)}" if each.waits else _name(each.node),
            "ph": "X",
            "pid": rank,
            "tid": streams.index(each.stream),
            "ts": each.begin * 1e6,
            "dur": (each.end - each.begin) * 1e6,
            "args": about,
        }


def _named(what: str, rank: int, stream: int, name: str) -> dict[str, object]:
    """An event of metadata."""
    return {"name": what, "ph": "M", "pid": rank, "tid": stream, "args": {"name": name}}


def _name(node: fx.Node) -> str:
    return str(COLLECTIVE.of(node)) if COLLECTIVE.on(node) else op_name(node)


def duration(seconds: float) -> str:
    """Seconds as text, in a unit that suits them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
