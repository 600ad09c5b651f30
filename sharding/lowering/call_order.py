"""Call order: before a plan communicates, its ranks check that they all make the same call.

Collectives are matched by order alone. Ranks that called two plans of equal shapes in different orders
would silently add up each other's values. The plan determines the sends of a call, so it is enough to
compare calls: the plan, the thread, and the number of earlier calls that failed. The check precedes all
communication, so every rank can raise the same error and continue.

In round k a rank sends its call to the rank 2**k further on in its group (a dissemination barrier:
Hensgen, Finkel and Manber 1988): after log2(n) rounds every rank has heard of a call that differs.
Messages go over gloo between hosts, whatever the backend of the plan's collectives, so no device waits;
and within a host over sockets (host_links.py), once two ranks know that they share one.

A rank with a new plan waits for the others in the store instead (plan_consistency.py): they may fail
before they have one, and a receive that has begun cannot be given up. If one of them turns out to wait in
a comparison, it joins that: then both hear of the difference.
"""

from __future__ import annotations

import datetime
import functools
import math
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import CollectiveError
from torchard.functional.execution.failures import failed
from torchard.functional.programs.labels import Label, label_of
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import SOURCE, STAGE
from torchard.sharding.layouts.tags import OVER
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.notes import waits_of, watch
from torchard.sharding.values.rounds import Round
from torchard.sharding.values.store_allgather import RankFailed, skip_turn, thread_name

__all__ = ["CallOrder", "PlanMismatch", "join_as_failed", "one_call_at_a_time"]

# The bytes of a message that describes a call; longer texts are truncated.
_LENGTH = 512
# In the place of a rank's number plus one and its differing call: none has been received so far.
_NONE = bytes(8 + _LENGTH)
_MESSAGE = _LENGTH + len(_NONE)


class PlanMismatch(RuntimeError):
    """Ranks planned different programs, or call the same plans in different orders.

    >>> # torchrun --nproc-per-node 2
    >>> import torch, torch.distributed as dist, torchard as ta
    >>> dist.init_process_group("gloo")
    >>> mesh = ta.Mesh({"dp": 2})
    >>> x = ta.place(torch.arange(8.0), mesh, ta.P("dp"))
    >>> def norm(x):
    ...     return (x * x).sum() if dist.get_rank() == 0 else (x * x).max()
    >>> ta.shard(norm, mesh)(x)
    Traceback (most recent call last):
        ...
    torchard.PlanMismatch: rank 0 has sum.default: float32[] as P()+sum(dp), where rank 1 has
        max.default: float32[] as P()+max(dp).
        The programs differ, so their collectives would not match. Every rank must call the same function
        with arguments of the same shapes, dtypes, specs and static values, and the same checkpoint
        policies.
        Rank 0 planned norm(args[0]: float32[8] as P('dp')), with sum_default =
        sum.default(mul_tensor,): float32[] as P()+sum(dp).
        Rank 1 planned norm(args[0]: float32[8] as P('dp')), with max_default =
        max.default(mul_tensor,): float32[] as P()+max(dp).
    """


class PlanCall(NamedTuple):
    """The description of a call, which must be equal on all ranks of a group.

    Attributes:
        number: the plan's number, in the order in which ranks agreed on plans; 0 for a new plan, -1 for
            an error in the place of one.
        failures: the number of calls that failed in this group after ranks had agreed to make them.
        thread: the name of the thread. Two threads may run in different orders on different ranks;
            nothing else distinguishes their calls of one plan.
        text: the plan as text, for messages.
    """

    number: int
    failures: int
    thread: str
    text: str

    def encoded(self) -> bytes:
        """The call as a message of fixed length."""
        return "\n".join(map(str, self)).encode()[:_LENGTH].ljust(_LENGTH, b"\0")

    @staticmethod
    def decoded(message: bytes) -> PlanCall:
        """The call in a message."""
        text = message.rstrip(b"\0").decode(errors="ignore")
        number, failures, thread, text = text.split("\n", 3)
        return PlanCall(int(number), int(failures), thread, text)

    @property
    def title(self) -> str:
        """The function and the plan, for the first line of a message: ``step (plan 3)``."""
        return f"{self.text.partition('(')[0]} ({self._plan})"

    @property
    def _plan(self) -> str:
        return f"plan {self.number}" if self.number else "a new plan"

    def __str__(self) -> str:
        return f"{self.text} ({self._plan})"


class Circle:
    """The ranks of one process group, and their connections."""

    def __init__(self, backend: Any, ranks: tuple[int, ...], peers: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.failures = self.begun = 0
        self.met = self.left = False
        # A tag: the ranks of the group and, in the remaining bits, the round.
        tag = zlib.crc32(repr(ranks).encode()) & 0x7FFFFFE0
        rounds = (len(ranks) - 1).bit_length()
        own = ranks.index(dist.get_rank())
        self.rounds = [Round(backend, tag + i, peers, own, 1 << i, _MESSAGE) for i in range(rounds)]
        self._mine, self._other = b"", _NONE

    def introduce(self, step: Callable[[Round, datetime.timedelta], None], patience: Any) -> None:
        """A step by which ranks of one host link themselves, before they first meet."""
        for round_ in self.rounds:
            step(round_, patience)

    def begin(self, call: bytes) -> None:
        """Post the receives of all rounds, so that no sender waits for one."""
        self._mine, self._other = call, _NONE
        self.begun += 1
        for round_ in self.rounds:
            round_.listen()

    def send(self, number: int) -> None:
        """Send this rank's call, and a differing one that it has received, in one round."""
        self.rounds[number].send(self._mine + self._other)

    def receive(self, number: int, patience: datetime.timedelta) -> None:
        """Receive in one round, and keep a call that differs: the sender's, or one that it received."""
        round_ = self.rounds[number]
        message, rank = round_.receive(patience), self.ranks[round_.source]
        mine, other = message[:_LENGTH], message[_LENGTH:]
        for heard in ((rank + 1).to_bytes(8, "little") + mine, other):
            differs = heard != _NONE and _what(heard[8:]) != _what(self._mine)
            if differs and _number(heard) < _number(self._other):
                self._other = heard

    def end(self, patience: datetime.timedelta) -> None:
        """Wait until all sends have completed."""
        for round_ in self.rounds:
            round_.end(patience)

    def leave(self) -> None:
        """Give up a comparison: messages of those who come to it later must not meet the next call."""
        self.left = True
        for round_ in self.rounds:
            round_.close()

    @property
    def other(self) -> tuple[int, PlanCall] | None:
        """A rank that makes a different call, and that call; None if there is none."""
        rank = int.from_bytes(self._other[:8], "little")
        return (rank - 1, PlanCall.decoded(self._other[8:])) if rank else None


def _what(call: bytes) -> list[bytes]:
    """What has to be equal in calls: not the text, which has the line of the first call on each rank."""
    return call.split(b"\n", 3)[:3]


def _number(heard: bytes) -> float:
    """The number of a plan in a message: errors and new plans are told before others."""
    return PlanCall.decoded(heard[8:]).number if heard != _NONE else math.inf


@functools.cache
def _circle(host: Any, ranks: tuple[int, ...]) -> Circle:
    """The circle of these ranks, shared by all meshes and groups that consist of them."""
    backend = internals.backend_of(host, "cpu")
    # The first call may be inside of a gradient, to which the memory of messages does not belong.
    with internals.clean_thread_state():
        return Circle(backend, ranks, tuple(dist.get_group_rank(host, rank) for rank in ranks))


class CallOrder:
    """Compares the calls of one plan with those that other ranks make.

    Args:
        local: this rank's graph, whose collectives name the groups it takes part in.

    Attributes:
        number: the number of the plan, once ranks have agreed on it; 0 before.
        text: the plan, for messages.
    """

    def __init__(self, mesh: Mesh, program: Program, local: fx.Graph, signature: str) -> None:
        self.name, self.number, self.mesh = program.name, 0, mesh
        self._circles: dict[Circle, Label] = {}
        for node in local.nodes:
            members = OVER.get(node) if STAGE.get(node) == "issue" else None
            if members is not None and mesh.host_group is not None and len(members) > 1:
                label = replace(label_of(node), stage="meet")
                self._circles.setdefault(_circle(mesh.host_group, tuple(sorted(members))), label)
        sources = (SOURCE.get(node) for node in program.graph.nodes)
        source = next((f" of {source}" for source in sources if source), "")
        self.text = f"{self.name}({signature}){source}"

    @property
    def needed(self) -> bool:
        """Whether the plan communicates."""
        return bool(self._circles)

    def compare(self) -> None:
        """Compare this call with the other ranks'; every rank of the plan's groups must take part.

        Raises:
            PlanMismatch: ranks make different calls. All ranks of a group raise it; nothing was sent.
            RankFailed: a rank raised an error before it came to its call.
            CollectiveError: a rank has exited, or does not arrive in time.
        """
        mine = {circle: self._call(circle) for circle in self._circles}
        try:
            _meet(mine, self.mesh.patience)
        except _Lost as lost:
            failed(lost.error, self._circles[lost.circle], self.name)

    def join(self, missing: Sequence[int], withdraw: Callable[[], None]) -> None:
        """Compare this call, of a new plan, with those in which missing ranks wait for this one, if any.

        Args:
            withdraw: takes back what those ranks would read if they went on after the comparison.

        Raises:
            PlanMismatch, RankFailed, CollectiveError: see `compare`.
        """
        try:
            _join(self.mesh, missing, self._call, withdraw)
        except _Lost as lost:
            ranks = ", ".join(map(str, lost.circle.ranks))
            raise CollectiveError(
                f"ranks {ranks} do not all make the same call: rank {dist.get_rank()} calls {self.text} "
                f"(a new plan), and lost the others: {lost.error}. Nothing was sent. Stop all ranks, and "
                "restart them from the last checkpoint."
            ) from lost.error

    def failed(self) -> None:
        """Record that the call that was compared has failed on this rank."""
        for circle in self._circles:
            circle.failures += 1

    def _call(self, circle: Circle) -> PlanCall:
        return PlanCall(self.number, circle.failures, thread_name(), self.text)


class _Lost(Exception):
    """A rank of a circle did not arrive."""

    def __init__(self, circle: Circle, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.circle, self.error = circle, error


def _meet(mine: dict[Circle, PlanCall], patience: datetime.timedelta) -> None:
    """Compare calls in some circles, all of whose ranks take part."""
    watch.begin(tuple((circle.ranks, circle.begun + 1) for circle in mine))
    try:
        _exchange_calls(mine, patience)
    finally:
        watch.end()
    for circle, call in mine.items():
        if circle.other is not None:
            _raise(dist.get_rank(), call, *circle.other)


_LEFT = "An earlier call was interrupted, or given up, while this rank waited in it for others"


def _exchange_calls(mine: dict[Circle, PlanCall], patience: datetime.timedelta) -> None:
    if (left := next((circle for circle in mine if circle.left), None)) is not None:
        raise _Lost(left, RuntimeError(_LEFT))
    try:
        new = [circle for circle in mine if not circle.met]
        for step in (Round.ask, Round.answer, Round.settle):
            for at in new:
                at.introduce(step, patience)
        for at, call in mine.items():
            at.met = True
            at.begin(call.encoded())
        for number in range(max((len(circle.rounds) for circle in mine), default=0)):
            circles = [circle for circle in mine if number < len(circle.rounds)]
            for at in circles:
                at.send(number)
            for at in circles:
                at.receive(number, patience)
        for at in mine:
            at.end(patience)
    except BaseException as error:  # also an interrupt
        for circle in mine:
            circle.leave()
        if isinstance(error, RuntimeError):
            raise _Lost(at, error) from None
        raise


def _join(
    mesh: Mesh,
    others: Sequence[int],
    call: Callable[[Circle], PlanCall],
    before: Callable[[], None] = lambda: None,
) -> bool:
    """Take part in comparisons in which others wait for this rank; return whether there was one.

    Args:
        before: called before anything is sent.
    """
    found = False
    for rank in others:
        for ranks, begun in waits_of(rank):
            if mesh.host_group is None or dist.get_rank() not in ranks:
                continue
            circle = _circle(mesh.host_group, ranks)
            if begun == circle.begun + 1:  # or it has met this rank since
                found = True
                before()
                _meet({circle: call(circle)}, mesh.patience)
    return found


def join_as_failed(mesh: Mesh, others: Sequence[int], text: str) -> bool:
    """Tell ranks that wait for this one's call of an error; return whether there were any."""
    try:
        return _join(mesh, others, lambda at: PlanCall(-1, at.failures, thread_name(), text))
    except (PlanMismatch, RankFailed, _Lost):
        return True


def _raise(rank: int, mine: PlanCall, other: int, theirs: PlanCall) -> None:
    if theirs.number >= 0:
        raise PlanMismatch(_different(rank, mine, other, theirs))
    if mine.number > 0:
        skip_turn()
    raise RankFailed(
        f"{theirs.text}, while rank {rank} waited for it to make the same call: {mine}. Nothing was sent."
    )


def _different(rank: int, mine: PlanCall, other: int, theirs: PlanCall) -> str:
    if mine.failures != theirs.failures:
        counts = f"{mine.failures} failed on rank {rank}, {theirs.failures} on rank {other}"
        return (
            f"ranks are out of step: of the calls that they had agreed to make, {counts}.\nNothing was "
            f"sent of this call: {mine.text}. Stop all ranks, and restart them from the last checkpoint."
        )
    if mine.thread != theirs.thread:
        remedy = (
            "Threads may run in a different order on each rank: make all calls of plans from one thread."
        )
        what = [f"{call.title} in thread {call.thread}" for call in (mine, theirs)]
    else:
        what = [mine.title, theirs.title]
        remedy = (
            "Every rank must make the same calls in the same order, with arguments of the same shapes, "
            "dtypes, specs and static values, and the same checkpoint policies."
        )
    return (
        f"rank {rank} calls {what[0]}, while rank {other} calls {what[1]}.\n"
        f"Nothing was sent. {remedy}\n"
        f"On rank {rank}: {mine.text}.\nOn rank {other}: {theirs.text}."
    )


class _OneAtATime:
    """A lock that lets one thread at a time run plans; entering returns whether the call is nested."""

    def __init__(self) -> None:
        self._lock, self._depth = threading.RLock(), 0

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        return self._depth > 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()


one_call_at_a_time = _OneAtATime()
