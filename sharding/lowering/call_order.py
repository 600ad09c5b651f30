"""The order of calls: before a plan sends anything, its ranks check that they all make the same call.

Collectives are matched by their order alone. Ranks that call two plans of the same shapes in different
orders would add up each other's values, and nothing would be raised. What a call sends follows from its
plan, so it is enough to compare calls: which plan, from which thread, after how many calls that failed.
When that is done nothing has been sent yet, so all ranks can raise the same error, and go on.

A rank tells its call to the one 1, 2, 4, … further on in its group (a dissemination barrier: Hensgen,
Finkel and Manber 1988): after log2(n) rounds all have heard of a call that differs. It travels between
hosts, over gloo, whatever carries the plan's own collectives, so no device waits for it.
"""

from __future__ import annotations

import datetime
import functools
import threading
import zlib
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.execution.failures import failed
from torchard.functional.programs.labels import Label, label_of
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import SOURCE, STAGE
from torchard.sharding.layouts.tags import OVER
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.store_allgather import thread_name

__all__ = ["CallOrder", "PlanMismatch", "one_call_at_a_time"]

# Bytes in which a rank tells its call; longer texts are cut off.
_LENGTH = 512
# A rank, and 1, and the call that it was heard to make; or that nobody was heard to make another one.
_NOBODY = bytes(8 + _LENGTH)


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
    torchard.PlanMismatch: rank 0 planned norm(args[0]: float32[8]), rank 1 planned norm(args[0]:
        float32[8]): the programs differ, and so would their collectives. Where they part, rank 0 has
        sum_default = sum.default(mul_tensor,): float32[] as P()+sum(dp), rank 1 has
        max_default = max.default(mul_tensor,): float32[] as P()+max(dp). Every rank must call the same
        function with arguments of the same shapes, dtypes, specs and static values, and the same
        checkpoint policies.
    """


class PlanCall(NamedTuple):
    """What all ranks of a group must have in common when a plan runs.

    Attributes:
        number: of the plan, in the order in which ranks agreed on plans; 0 for a new one.
        failures: how many calls failed in this group after ranks had agreed to make them.
        thread: the name of the thread. Two threads run in any order, and not in the same one on all
            ranks; nothing else tells their calls of one plan apart.
        text: the plan, for people.
    """

    number: int
    failures: int
    thread: str
    text: str

    def told(self) -> bytes:
        return "\n".join(map(str, self)).encode()[:_LENGTH].ljust(_LENGTH, b"\0")

    @staticmethod
    def heard(told: bytes) -> PlanCall:
        text = told.rstrip(b"\0").decode(errors="ignore")
        number, failures, thread, text = text.split("\n", 3)
        return PlanCall(int(number), int(failures), thread, text)

    def __str__(self) -> str:
        return f"{self.text}, which is {'new' if not self.number else f'plan {self.number}'}"


class Circle:
    """The ranks of one process group, and how they reach each other between hosts."""

    def __init__(self, backend: Any, ranks: tuple[int, ...], peers: tuple[int, ...]) -> None:
        self.backend, self.ranks, self.peers = backend, ranks, peers
        self.failures = 0
        # Which ranks it is of, and, in what is left, which round.
        tag = zlib.crc32(repr(ranks).encode()) & 0x7FFFFFE0
        rounds = (len(ranks) - 1).bit_length()
        self.rounds = [_Round(self, tag + i, 1 << i) for i in range(rounds)]
        self._mine, self._other = b"", _NOBODY

    def begin(self, told: bytes) -> None:
        """Be ready to hear in all rounds: then nobody waits to be asked."""
        self._mine, self._other = told, _NOBODY
        for each in self.rounds:
            each.listen()

    def tell(self, number: int) -> None:
        """Tell the rank further on what this one has heard."""
        self.rounds[number].tell(self._mine + self._other)

    def hear(self, number: int, patience: datetime.timedelta) -> None:
        """Remember a call that differs, heard of at first or second hand."""
        rank, mine, other = self.rounds[number].hear(patience)
        if mine != self._mine:
            self._other = (rank + 1).to_bytes(8, "little") + mine
        elif other != _NOBODY:
            self._other = other

    def end(self, patience: datetime.timedelta) -> None:
        """Be sure that all have heard it."""
        for each in self.rounds:
            each.sending.wait(patience)

    @property
    def other(self) -> tuple[int, PlanCall] | None:
        """A rank that makes another call, and which."""
        rank = int.from_bytes(self._other[:8], "little")
        return (rank - 1, PlanCall.heard(self._other[8:])) if rank else None


class _Round:
    """This rank tells the one so much further on, and hears from the one so much behind."""

    def __init__(self, circle: Circle, tag: int, distance: int) -> None:
        own, size = circle.ranks.index(dist.get_rank()), len(circle.ranks)
        source = (own - distance) % size
        self.backend, self.tag, self.rank = circle.backend, tag, circle.ranks[source]
        self.to, self.source = circle.peers[(own + distance) % size], circle.peers[source]
        self._sent, self._heard = (torch.zeros(2 * _LENGTH + 8, dtype=torch.uint8) for _ in "ab")
        # Used without torch: whatever modes are live around the call, these are plain bytes.
        bytes_of: Any = memoryview
        self._told, self._read = bytes_of(self._sent.numpy()), bytes_of(self._heard.numpy())
        self.sending: Any = None
        self._receiving: Any = None

    def listen(self) -> None:
        self._receiving = self.backend.recv([self._heard], self.source, self.tag)

    def tell(self, told: bytes) -> None:
        self._told[:] = told
        self.sending = self.backend.send([self._sent], self.to, self.tag)

    def hear(self, patience: datetime.timedelta) -> tuple[int, bytes, bytes]:
        """From whom, its call, and another that it has heard of."""
        self._receiving.wait(patience)
        return self.rank, bytes(self._read[:_LENGTH]), bytes(self._read[_LENGTH:])


@functools.cache
def _circle(host: Any, ranks: tuple[int, ...]) -> Circle:
    """One for the same ranks, whichever meshes and groups they are in."""
    backend = internals.backend_of(host, "cpu")
    return Circle(backend, ranks, tuple(dist.get_group_rank(host, rank) for rank in ranks))


class CallOrder:
    """Compares the calls of one plan with those that other ranks make.

    Args:
        local: the graph of this rank, whose collectives say which groups it takes part in.

    Attributes:
        number: what ranks that agreed on the plan call it; 0 before.
    """

    def __init__(self, mesh: Mesh, program: Program, local: fx.Graph, signature: str) -> None:
        self.name, self.number, self.mesh = program.name, 0, mesh
        self._circles: dict[Circle, Label] = {}
        for node in local.nodes:
            axes = OVER.get(node) if STAGE.get(node) == "issue" else None
            if axes is not None and mesh.host_group is not None:
                ranks = tuple(sorted(dist.get_process_group_ranks(mesh.group(axes))))
                if len(ranks) > 1:
                    label = replace(label_of(node), stage="meet")
                    self._circles.setdefault(_circle(mesh.host_group, ranks), label)
        sources = (SOURCE.get(node) for node in program.graph.nodes)
        source = next((f" of {source}" for source in sources if source), "")
        self._text = f"{self.name}({signature}){source}"

    @property
    def needed(self) -> bool:
        """Whether the plan sends anything."""
        return bool(self._circles)

    def compare(self) -> None:
        """Every rank of the plan's groups must call this before it runs the plan.

        Raises:
            PlanMismatch: they make different calls; all of a group raise it, and nothing was sent.
            CollectiveError: a rank has ended, or does not come.
        """
        mine = {circle: self._call(circle) for circle in self._circles}
        patience = self.mesh.patience
        if not self.number:  # others may still be planning, for which ranks wait as the mesh says
            patience = max(patience, datetime.timedelta(seconds=self.mesh.timeout))
        try:
            for at, call in mine.items():
                at.begin(call.told())
            for number in range(max((len(circle.rounds) for circle in mine), default=0)):
                telling = [circle for circle in mine if number < len(circle.rounds)]
                for at in telling:
                    at.tell(number)
                for at in telling:
                    at.hear(number, patience)
            for at in mine:
                at.end(patience)
        except RuntimeError as error:
            failed(error, self._circles[at], self.name)
        for circle, call in mine.items():
            if circle.other is not None:
                raise PlanMismatch(_different(dist.get_rank(), call, *circle.other))

    def failed(self) -> None:
        """The call that was compared has not come to its end here."""
        for circle in self._circles:
            circle.failures += 1

    def _call(self, circle: Circle) -> PlanCall:
        return PlanCall(self.number, circle.failures, thread_name(), self._text)


def _different(rank: int, mine: PlanCall, other: int, theirs: PlanCall) -> str:
    if mine.failures != theirs.failures:
        counts = f"{mine.failures} on rank {rank} and {theirs.failures} on rank {other}"
        return (
            f"ranks are out of step before {mine.text}: calls that ranks had agreed to make have failed, "
            f"{counts}. Nothing of this call was sent. End all ranks, and start them again from the last "
            "checkpoint."
        )
    if mine.thread != theirs.thread:
        remedy = (
            "Threads run in any order, on each rank in another one: let one thread make all calls of "
            "plans."
        )
        calls = [f"{call} in thread {call.thread}" for call in (mine, theirs)]
    else:
        calls = [str(mine), str(theirs)]
        remedy = (
            "Every rank must make the same calls in the same order, with arguments of the same shapes, "
            "dtypes, specs and static values, and the same checkpoint policies."
        )
    what = f"rank {rank} calls {calls[0]}, while rank {other} calls {calls[1]}"
    return f"{what}. Nothing was sent. {remedy}"


class _OneAtATime:
    """Lets one thread of this process run plans; says whether the call is within another one."""

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
