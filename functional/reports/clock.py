"""Clock: when each thing runs, by the rates of a machine.

The list of what each rank runs is run with storages in the place of tensors, which gives a sequence of
*acts*: operations, issues of transfers and waits for them. Their order does not depend on time, so the
acts of all ranks are then played together. Operations of a rank run one after another. A transfer runs
from its issue by all who take part, or from the end of the one before it on the same link, and
computation waits for it where the list does: what it waits is *exposed*. A send meets the receive that
is as many transfers further on between the same two ranks, as on a process group.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from torchard.functional.core.errors import PipelineError
from torchard.functional.execution.instructions import Instruction, Write
from torchard.functional.execution.storages import StorageRun
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.records import Record
from torchard.functional.programs.tags import COLLECTIVE, ENDS, STAGE, TASK
from torchard.functional.remat.liveness import RankList

__all__ = ["COMPUTE", "Interval", "RankTimeline", "timelines"]

COMPUTE = ()  # the stream of operations; those of collectives are their axes
Seconds = Callable[[fx.Node], float]


@dataclass(frozen=True)
class Interval:
    """What runs from one time to another, in seconds.

    Attributes:
        stream: `COMPUTE`, or the axes of a collective; of a send, also the two ranks.
        waits: whether nothing is computed, for lack of what the node awaits.
    """

    node: fx.Node
    stream: tuple[str, ...]
    begin: float
    end: float
    waits: bool = False


@dataclass
class RankTimeline:
    """Everything that runs on one rank; on each stream, in the order in which it begins."""

    intervals: list[Interval] = field(default_factory=list)

    @property
    def end(self) -> float:
        return max((each.end for each in self.intervals), default=0.0)

    @property
    def computing(self) -> list[Interval]:
        """The operations."""
        return [each for each in self.intervals if each.stream == COMPUTE and not each.waits]


def timelines(
    lists: Sequence[RankList], machine: Machine, seconds: Sequence[Seconds]
) -> list[RankTimeline]:
    """The timelines of ranks that run these lists.

    Args:
        seconds: for each list, the time of an operation; it is in the memory of its base if the list
            says so.

    Raises:
        PipelineError: the ranks wait for each other. Names the transfers.
    """
    links = _Links(lists)
    acts = [_Acts(links, n, machine, each).of_list() for n, each in enumerate(seconds)]
    ranks = [_Rank(each, machine.call) for each in acts]
    _play(ranks, machine)
    return [rank.done for rank in ranks]


# -- acts ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Transfer:
    """Values that several ranks send to each other.

    Attributes:
        link: what one transfer at a time runs on.
        busy: the seconds in which its ranks send, and do not compute.
        members: the number of ranks of the simulation that take part.
        issued: those that have issued it, each with the timeline and the node.
        end: when it ends, once all have.
    """

    link: tuple[Any, ...]
    stream: tuple[str, ...]
    seconds: float
    busy: float
    members: int
    issued: list[tuple[RankTimeline, fx.Node]] = field(default_factory=list)
    end: float | None = None

    def issue(self, by: RankTimeline, node: fx.Node, now: float, free: dict[Any, float]) -> None:
        self.issued.append((by, node))
        if len(self.issued) == self.members:
            begin = max(now, free.get(self.link, 0.0))
            free[self.link] = self.end = begin + self.seconds
            for done, issue in self.issued:
                done.intervals.append(Interval(issue, self.stream, begin, self.end))


class _Act(NamedTuple):
    """One thing that a rank does.

    Attributes:
        seconds: how long it computes.
        transfer: what is issued or awaited, if anything.
        waits: whether the transfer is awaited; of an operation, whether its seconds are a transfer's.
    """

    node: fx.Node
    seconds: float = 0.0
    transfer: _Transfer | None = None
    waits: bool = False


class _Links:
    """The transfers of all ranks, by link and number."""

    def __init__(self, lists: Sequence[RankList]) -> None:
        self.lists = lists
        self.known: dict[tuple[Any, ...], _Transfer] = {}
        self.counts: Counter[tuple[int, Any]] = Counter()

    def transfer(self, rank: int, node: fx.Node, machine: Machine) -> _Transfer:
        """The transfer that a rank's next issue on a link is part of."""
        record: Record = COLLECTIVE.of(node)
        axes, speed, size = record.over(machine)
        home = self.lists[rank].home
        members: Sequence[int] = [rank]
        link: tuple[Any, ...] = (*axes, *sorted(home.items()))
        stream = axes
        if (ends := ENDS.get(node)) is not None:
            axis, source, to = ends
            others = {k: v for k, v in home.items() if k != axis}
            link, stream = (*ends, *sorted(others.items())), (axis, f"{source}→{to}")
            members = [source, to]
        elif not home.keys().isdisjoint(axes):
            others = {k: v for k, v in home.items() if k not in axes}
            members = [
                n for n, each in enumerate(self.lists) if others.items() <= each.home.items()
            ]
            link = (*axes, *sorted(others.items()))
        number = self.counts[rank, link]
        self.counts[rank, link] += 1
        busy = (1 - machine.overlaps) * size / speed.bandwidth
        busy += (1 - machine.hides) * speed.latency
        made = _Transfer(link, stream, speed.seconds(size), busy, len(members))
        return self.known.setdefault((link, number), made)


class _Acts(StorageRun):
    """The acts of one rank, in order."""

    def __init__(self, links: _Links, rank: int, machine: Machine, seconds: Seconds) -> None:
        self.listed = links.lists[rank]
        super().__init__(self.listed.inputs, self.listed.donated, self.listed.results)
        self.links, self.rank, self.machine, self.seconds = links, rank, machine, seconds
        self.acts: list[_Act] = []
        self.transfers: dict[Any, _Transfer] = {}  # by what their issue returned

    def of_list(self) -> list[_Act]:
        self.all(self.listed.runs.instructions)
        return self.acts

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
            if (transfer := self.transfers.pop(operands[0], None)) is not None:
                self.acts.append(_Act(node, transfer=transfer, waits=True))
        else:
            self._compute(node)
        return result

    def _compute(self, node: fx.Node) -> None:
        if taken := self.seconds(node):
            self.acts.append(_Act(node, taken))

    def _issue(self, node: fx.Node, result: Any) -> None:
        transfer = self.links.transfer(self.rank, node, self.machine)
        self.transfers[result] = transfer
        self.acts.append(_Act(node, transfer=transfer))
        if transfer.busy:
            self.acts.append(_Act(node, transfer.busy, waits=True))


# -- all ranks together ----------------------------------------------------------------------------


class _Rank:
    """One rank, at one of its acts.

    Attributes:
        left: the seconds for which it still computes; None if it has not begun the act.
        begun: when it began the act.
    """

    def __init__(self, acts: Sequence[_Act], begun: float) -> None:
        self.acts, self.at, self.done = acts, 0, RankTimeline()
        self.left: float | None = None
        self.begun = begun

    @property
    def act(self) -> _Act | None:
        return self.acts[self.at] if self.at < len(self.acts) else None

    @property
    def awaits(self) -> _Transfer | None:
        act = self.act
        return None if act is None or self.left else act.transfer

    def settle(self, now: float, free: dict[Any, float]) -> bool:
        """Do all acts that take no more time; whether there were any."""
        before = self.at
        while (act := self.act) is not None and self._ends(act, now, free):
            if now > self.begun:
                waits = act.waits or act.transfer is not None
                self.done.intervals.append(Interval(act.node, COMPUTE, self.begun, now, waits))
            self.at, self.left, self.begun = self.at + 1, None, now
        return self.at > before

    def _ends(self, act: _Act, now: float, free: dict[Any, float]) -> bool:
        transfer = act.transfer
        if transfer is None:
            self.left = act.seconds if self.left is None else self.left
            return self.left <= 0
        if not act.waits:
            transfer.issue(self.done, act.node, now, free)
            return True
        return transfer.end is not None and transfer.end <= now


def _play(ranks: Sequence[_Rank], machine: Machine) -> None:
    """Run the acts of all ranks, from one end of an act or transfer to the next."""
    now, free = machine.call, dict[Any, float]()
    while True:
        while any([rank.settle(now, free) for rank in ranks]):
            pass
        computing = [rank for rank in ranks if rank.left]
        speed = machine.speed(len(computing) / len(ranks))
        ends = {rank: now + (rank.left or 0.0) / speed for rank in computing}
        arrivals = [t.end for rank in ranks if (t := rank.awaits) is not None and t.end is not None]
        if not ends and not arrivals:
            break
        then = min(itertools.chain(ends.values(), arrivals))
        for rank, end in ends.items():
            rank.left = 0.0 if end == then else max((rank.left or 0.0) - (then - now) * speed, 0.0)
        now = then
    if any(rank.act is not None for rank in ranks):
        raise PipelineError(f"Ranks wait for transfers that others never issue: {_stuck(ranks)}.")


def _stuck(ranks: Iterable[_Rank]) -> str:
    waits = []
    for number, rank in enumerate(ranks):
        if rank.act is not None:
            node = rank.act.node
            task = f" of {TASK.of(node)}" if TASK.on(node) else ""
            waits.append(f"rank {number} for {COLLECTIVE.of(node)}{task}")
    return "; ".join(waits)
