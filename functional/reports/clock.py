"""Clock: when each thing runs, by the rates of a machine.

The list of what runs is run with seconds in the place of tensors. Operations run one after another. A
collective runs from its issue, or from the end of the one before it over the same axes, and computation
waits for it where the list does: what it waits is *exposed*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchard.functional.execution.instructions import Instruction, Write
from torchard.functional.execution.storages import Results, StorageRun
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.records import Record
from torchard.functional.programs.tags import COLLECTIVE, STAGE

__all__ = ["COMPUTE", "Interval", "RankTimeline", "timeline"]

COMPUTE = ()  # the stream of operations; those of collectives are their axes
Seconds = Callable[[fx.Node], float]


@dataclass(frozen=True)
class Interval:
    """What runs from one time to another, in seconds.

    Attributes:
        stream: `COMPUTE`, or the axes of a collective.
        waits: whether nothing is computed, for lack of what the node awaits.
    """

    node: fx.Node
    stream: tuple[str, ...]
    begin: float
    end: float
    waits: bool = False


@dataclass
class RankTimeline:
    """Everything that runs on one rank, in the order in which it begins."""

    intervals: list[Interval] = field(default_factory=list)

    @property
    def end(self) -> float:
        return max((each.end for each in self.intervals), default=0.0)


def timeline(
    instructions: Sequence[Instruction],
    inputs: Sequence[fx.Node],
    donated: Collection[int],
    results: Results,
    machine: Machine,
    seconds: Seconds,
) -> RankTimeline:
    """The timeline of what runs.

    Args:
        results: what operations compute, as for storages.
        seconds: the time of an operation; it is in the memory of its base if the list says so.
    """
    run = _Clock(inputs, donated, results, machine, seconds)
    run.all(instructions)
    return run.done


class _Clock(StorageRun):
    """Runs instructions with the times of operations.

    Attributes:
        now: the time at which the operations so far are done.
        free: the time at which each link is free again.
        arrives: the time at which the result of each collective under way arrives.
    """

    def __init__(
        self,
        inputs: Sequence[fx.Node],
        donated: Collection[int],
        results: Results,
        machine: Machine,
        seconds: Seconds,
    ) -> None:
        super().__init__(inputs, donated, results)
        self.machine, self.seconds, self.done = machine, seconds, RankTimeline()
        self.now, self.free = 0.0, defaultdict[tuple[str, ...], float](float)
        self.arrives: dict[Any, float] = {}

    def _one(self, instruction: Instruction, i: Any) -> None:
        super()._one(instruction, i)
        if isinstance(instruction, Write) and instruction.node is not None:
            self._compute(instruction.node)

    def computed(self, node: fx.Node, operands: Any, i: int | None) -> Any:
        result = super().computed(node, operands, i)
        stage = STAGE.get(node)
        if stage == "issue":
            self._issue(node, result)
        elif stage == "wait":
            self._wait(node, self.arrives.pop(result, self.now))
        else:
            self._compute(node)
        return result

    def _compute(self, node: fx.Node) -> None:
        self._spend(node, self.now + self.seconds(node))

    def _spend(self, node: fx.Node, end: float, waits: bool = False) -> None:
        if end > self.now:
            self.done.intervals.append(Interval(node, COMPUTE, self.now, end, waits))
            self.now = end

    def _issue(self, node: fx.Node, result: Any) -> None:
        self._compute(node)
        record: Record = COLLECTIVE.of(node)
        axes, taken = record.over(self.machine)
        begin = max(self.now, self.free[axes])
        self.free[axes] = end = begin + taken
        self.done.intervals.append(Interval(node, axes, begin, end))
        self.arrives[result] = end
        if not self.machine.overlaps:
            self._wait(node, end)

    def _wait(self, node: fx.Node, until: float) -> None:
        self._spend(node, until, waits=True)
