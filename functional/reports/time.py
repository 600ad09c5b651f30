"""The time of a program on a machine: how long it takes, and where communication is exposed."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

from torchard.functional.costs.flops import flops, is_product, op_name
from torchard.functional.costs.seconds import seconds_of
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import Record, Records
from torchard.functional.programs.tags import COLLECTIVE, SCOPE, SOURCE, VAL
from torchard.functional.remat.liveness import RankList, lists_of
from torchard.functional.reports.clock import COMPUTE, Interval, RankTimeline, timeline

__all__ = ["Exposed", "Time", "time_of"]


@dataclass(frozen=True)
class Exposed(Record):
    """Communication that computation waits for.

    Attributes:
        record: what is sent.
        source, scope: the source line and scope of the operation that needs it.
        seconds: how long computation waits, in all iterations; ``sent``: how long sending takes.
        times: the number of times.
    """

    record: Record
    source: str
    scope: str
    seconds: float
    sent: float
    times: int

    @classmethod
    def table(cls, records: Sequence[Exposed]) -> str:
        rows = [("exposed", "sent", "times", "collective", "source", "scope")]
        rows += [
            (_text(r.seconds), _text(r.sent), str(r.times), str(r.record), r.source, r.scope)
            for r in records
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([lines[0], "  ".join("-" * n for n in widths), *lines[1:]])

    def __str__(self) -> str:
        return f"{_text(self.seconds)} of {self.record} at {self.source}"


@dataclass(frozen=True)
class Time:
    """The predicted time of a program on one rank.

    Attributes:
        machine: the machine whose rates are used.
        seconds: from the first operation to the last, or to the end of the last collective.
        computing: seconds in which the rank computes.
        flops: FLOPs of the rank's products.
        exposed: the communication that computation waits for, by line, the longest first.
        timeline: what runs when.
    """

    machine: Machine
    seconds: float
    computing: float
    flops: int
    exposed: Records
    timeline: RankTimeline

    @property
    def share(self) -> float:
        """The rank's FLOPs per second, as a share of the machine's fastest rate."""
        return self.flops / max(self.seconds, 1e-30) / max(self.machine.flops.values())

    def trace(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace that chrome://tracing and Perfetto show: computation, and each link."""
        out = Path(path)
        out.write_text(json.dumps({"traceEvents": _events(self.timeline)}), encoding="utf-8")
        return out

    def __str__(self) -> str:
        waits = sum(each.seconds for each in self.exposed)
        head = (
            f"{_text(self.seconds)} on {self.machine.name}: computes {_text(self.computing)}, waits "
            f"{_text(waits)}; {self.share:.1%} of its FLOPs"
        )
        return f"{head}\n\n{self.exposed}" if self.exposed else head


def time_of(program: Program, machine: Machine) -> Time:
    """The time of a program on a machine; on a mesh, of one of its ranks.

    Raises:
        ValueError: the ranks run different operations.
    """
    lists = lists_of(program)
    if len(lists) > 1:
        raise ValueError(
            f"{program.name} is a pipeline, whose ranks wait for each other; .schedule has its timeline."
        )
    (listed,) = lists
    for node, value in (listed.values or {}).items():
        VAL.set(node, value)
    run = _timeline(listed, machine)
    computing = [each for each in run.intervals if each.stream == COMPUTE and not each.waits]
    return Time(
        machine,
        run.end,
        sum(each.end - each.begin for each in computing),
        sum(flops(each.node) for each in computing if is_product(each.node)),
        Records(_exposed(run)),
        run,
    )


def _timeline(listed: RankList, machine: Machine) -> RankTimeline:
    written = listed.runs.nodes

    def seconds(node: fx.Node) -> float:
        return seconds_of(node, machine, written.get(node))

    return timeline(
        listed.runs.instructions, listed.inputs, listed.donated, listed.results, machine, seconds
    )


def _exposed(run: RankTimeline) -> list[Exposed]:
    """Waits by source line and collective."""
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
    found = [
        Exposed(
            COLLECTIVE.of(each[0].node),
            *key[1:],
            sum(x.end - x.begin for x in each),
            sent[key],
            len(each),
        )
        for key, each in waited.items()
    ]
    return sorted(found, key=lambda each: -each.seconds)


def _events(run: RankTimeline) -> list[dict[str, object]]:
    """Complete events of the Trace Event Format, in microseconds."""
    return [
        {
            "name": f"wait for {COLLECTIVE.of(each.node)}" if each.waits else _name(each.node),
            "ph": "X",
            "pid": 0,
            "tid": "compute" if each.stream == COMPUTE else "·".join(each.stream),
            "ts": each.begin * 1e6,
            "dur": (each.end - each.begin) * 1e6,
            "args": {"source": SOURCE.get(each.node, ""), "scope": SCOPE.get(each.node, "")},
        }
        for each in run.intervals
    ]


def _name(node: fx.Node) -> str:
    return str(COLLECTIVE.of(node)) if COLLECTIVE.on(node) else op_name(node)


def _text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
