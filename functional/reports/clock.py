"""Clock: when each thing runs, by the rates of a machine.

The list of what each rank runs is run with storages in the place of tensors, which gives a sequence of
*acts*: operations, issues of transfers and waits for them. Their order does not depend on time, so the
acts of all ranks are then played together. Operations of a rank run one after another. A transfer runs
from its issue by all who take part, or from the end of the one before it on the same link, and
computation waits for it where the list does: what it waits is *exposed*. Ranks that share processors
compute and send the faster, the fewer of them do. A send meets the receive that
is as many transfers further on between the same two ranks, as on a process group.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from torchard.functional.core.errors import PipelineError
from torchard.functional.execution.instructions import Instruction, Write
from torchard.functional.execution.sequencing import RankList
from torchard.functional.execution.storages import StorageRun
from torchard.functional.machines.machine import Machine
from torchard.functional.programs.records import Record
from torchard.functional.programs.tags import COLLECTIVE, ENDS, STAGE, TASK

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
        sending: the seconds for which its ranks still send, and do not compute.
        rest: the seconds for which the link still carries it after that.
        members: the ranks of the simulation that take part.
        issued: those that have issued it, each with the timeline and the node.
        begin: when it begins, once all have issued it and the one before it has ended.
    """

    link: tuple[Any, ...]
    stream: tuple[str, ...]
    sending: float
    rest: float
    members: Sequence[int]
    issued: list[tuple[RankTimeline, fx.Node]] = field(default_factory=list)
    begin: float | None = None
    ended: bool = False

    def left(self, speed: float) -> float:
        """The seconds to the end of what it does now, while ranks compute at a speed."""
        return self.sending / speed if self.sending else self.rest

    def node_of(self, by: RankTimeline) -> fx.Node:
        """The node by which a rank has issued it."""
        return next(node for done, node in self.issued if done is by)

    def run(self, seconds: float, speed: float, now: float) -> None:
        """Go on for some seconds, at most what is `left`, until now."""
        if self.sending:
            self.sending = _after(self.sending, seconds, speed)
        else:
            self.rest = _after(self.rest, seconds, 1.0)
        if not self.sending and not self.rest:
            assert self.begin is not None
            self.ended = True
            for done, node in self.issued:
                done.intervals.append(Interval(node, self.stream, self.begin, now))


def _after(left: float, seconds: float, speed: float) -> float:
    """What is left of some seconds of work after others at a speed; nothing if it ends then."""
    return 0.0 if seconds == left / speed else max(left - seconds * speed, 0.0)


class _Act(NamedTuple):
    """One thing that a rank does.

    Attributes:
        seconds: how long it computes.
        transfer: what is issued or awaited, if anything.
        waits: whether the transfer is awaited.
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
        sending = machine.sending(speed, size)
        rest = max(speed.seconds(size) - sending, 0.0)  # not less by rounding
        made = _Transfer(link, stream, sending, rest, members)
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


# -- all ranks together ----------------------------------------------------------------------------

_Queues = defaultdict[tuple[Any, ...], deque[_Transfer]]  # of each link, in the order of issue


class _Rank:
    """One rank, at one of its acts.

    Attributes:
        left: the seconds for which it still computes; None if it has not begun the act.
        begun: when it began the act.
        sent: the seconds of the act in which it did not compute, since it sent, by transfer.
    """

    def __init__(self, acts: Sequence[_Act], begun: float) -> None:
        self.acts, self.at, self.done = acts, 0, RankTimeline()
        self.left: float | None = None
        self.begun = begun
        self.sent: defaultdict[_Transfer, float] = defaultdict(float)

    @property
    def act(self) -> _Act | None:
        return self.acts[self.at] if self.at < len(self.acts) else None

    def settle(self, now: float, links: _Queues) -> bool:
        """Do all acts that take no more time; whether there were any."""
        before = self.at
        while (act := self.act) is not None and self._ends(act, links):
            for transfer, seconds in self.sent.items():
                self._did(transfer.node_of(self.done), self.begun + seconds, waits=True)
            self._did(act.node, now, act.transfer is not None)
            self.sent.clear()
            self.at, self.left = self.at + 1, None
        return self.at > before

    def _did(self, node: fx.Node, now: float, waits: bool) -> None:
        if now > self.begun:
            self.done.intervals.append(Interval(node, COMPUTE, self.begun, now, waits))
            self.begun = now

    def _ends(self, act: _Act, links: _Queues) -> bool:
        transfer = act.transfer
        if transfer is None:
            self.left = act.seconds if self.left is None else self.left
            return self.left <= 0
        if act.waits:
            return transfer.ended
        transfer.issued.append((self.done, act.node))
        if len(transfer.issued) == len(transfer.members):
            links[transfer.link].append(transfer)
        return True


def _play(ranks: Sequence[_Rank], machine: Machine) -> None:
    """Run the acts of all ranks, from one end of an act or transfer to the next."""
    now, links = machine.call, _Queues(deque)
    while True:
        while any([rank.settle(now, links) for rank in ranks]) or _begun(links, now):
            pass
        carried = [queue[0] for queue in links.values() if queue]
        sending = {n: transfer for transfer in carried if transfer.sending for n in transfer.members}
        computing = [rank for n, rank in enumerate(ranks) if rank.left and n not in sending]
        speed = machine.speed((len(computing) + len(sending)) / len(ranks))
        ends = [(rank.left or 0.0) / speed for rank in computing]
        ends += [transfer.left(speed) for transfer in carried]
        if not ends:
            break
        then = min(ends)
        now += then
        for rank in computing:
            rank.left = _after(rank.left or 0.0, then, speed)
        for n, transfer in sending.items():
            if ranks[n].left:
                ranks[n].sent[transfer] += then
        for transfer in carried:
            transfer.run(then, speed, now)
    if any(rank.act is not None for rank in ranks):
        raise PipelineError(f"Ranks wait for transfers that others never issue: {_stuck(ranks)}.")


def _begun(links: _Queues, now: float) -> bool:
    """Begin the first transfer of each link, once those before it have ended; whether any has ended."""
    ended = False
    for queue in links.values():
        while queue and queue[0].ended:
            queue.popleft()
        if queue and queue[0].begin is None:
            queue[0].begin = now
            if not queue[0].left(1.0):  # it takes no time
                queue[0].run(0.0, 1.0, now)
                ended = True
    return ended


def _stuck(ranks: Iterable[_Rank]) -> str:
    waits = []
    for number, rank in enumerate(ranks):
        if rank.act is not None:
            node = rank.act.node
            task = f" of {TASK.of(node)}" if TASK.on(node) else ""
            waits.append(f"rank {number} for {COLLECTIVE.of(node)}{task}")
    return "; ".join(waits)
