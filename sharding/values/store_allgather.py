"""An all_gather of small JSON values through the process group's store, with a timeout.

Ranks wait by asking the store again and again. So one that fails before it has anything to send can
report the error in its place, and the others raise at once.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torchard.functional.torch_internals.accessors.optional import default_store
from torchard.functional.torch_internals.store import StoreError, ask
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.notes import end_of, key_of, note_end

__all__ = [
    "ExchangeError",
    "OutOfStep",
    "RankFailed",
    "exchange",
    "missing_in",
    "next_turn",
    "report_failure",
    "skip_turn",
    "thread_name",
]


class ExchangeError(RuntimeError):
    """A rank did not answer within the time that the others waited for it (``Mesh(..., timeout=)``).

    >>> # torchrun --nproc-per-node 2
    >>> import os, torch, torch.distributed as dist, torchard as ta
    >>> dist.init_process_group("gloo")
    >>> mesh = ta.Mesh({"dp": 2}, timeout=1.0)
    >>> if dist.get_rank() == 1:
    ...     os._exit(0)                                                 # rank 1 is lost
    >>> ta.place(torch.arange(8.0), mesh, ta.P("dp"))
    Traceback (most recent call last):
        ...
    torchard.ExchangeError: rank 1 did not report what it passed to place within 1 s. It has ended, or is
        busy for longer than this; in that case pass a larger timeout to Mesh (by default it is the
        process group's).
    """


class OutOfStep(ExchangeError):
    """Ranks make different calls, or make the same calls from different threads."""


class RankFailed(ExchangeError):
    """Another rank raised an error before it reached the point at which this rank waits for it.

    >>> # torchrun --nproc-per-node 2
    >>> import torch, torch.distributed as dist, torchard as ta
    >>> dist.init_process_group("gloo")
    >>> mesh = ta.Mesh({"dp": 2})
    >>> def fn(x):
    ...     if dist.get_rank() == 1:
    ...         raise ValueError("no such token")
    ...     return x.sum()
    >>> ta.shard(fn, mesh)(torch.ones(4))                                # on rank 0
    Traceback (most recent call last):
        ...
    torchard.RankFailed: rank 1 raised ValueError: no such token (...:3 in fn), while rank 0 waited
        for the plan. Nothing of this call was sent.
    """


class _Turns:
    """The numbers of exchanges: the same on all ranks, as all make the same ones."""

    def __init__(self) -> None:
        self.next = 0

    def __next__(self) -> int:
        self.next += 1
        return self.next - 1


_turns = _Turns()
Meanwhile = Callable[[Sequence[int], Callable[[], None]], None]
_WAIT_LONGER = (
    "It has ended, or is busy for longer than this; in that case pass a larger timeout to Mesh (by "
    "default it is the process group's)."
)
# Seconds between two checks that all ranks have reported, and before the missing ranks are
# determined.
_SOON, _SELDOM, _LOOK = 0.001, 0.1, 0.5
# In place of a value's description: the report is of an error.
_FAILED = "failed"


def exchange(
    mesh: Mesh,
    what: str,
    mine: Any,
    timeout: float | None = None,
    remedy: str = _WAIT_LONGER,
    meanwhile: Meanwhile | None = None,
) -> list[Any]:
    """The JSON values of all ranks of the mesh, in the mesh's order of ranks.

    Every rank must make the same calls, in the same order.

    Args:
        mesh: a mesh of processes.
        what: a description of the value, for messages.
        mine: this rank's value.
        timeout: seconds; by default ``mesh.timeout``.
        remedy: what to do about a rank that sent nothing, for messages.
        meanwhile: called now and then with the ranks that are waited for, and a function that withdraws
            this rank's value. It must do that before it sends anything by which those ranks go on, as
            they may come to another exchange at once. If it raises, this exchange did not take place.

    Raises:
        ExchangeError: a rank sent nothing within the timeout, or the store does not answer; names the
            rank and ``what``.
        RankFailed: a rank raised an error instead.
        OutOfStep: a rank is at a different exchange, or at this one in a different thread.
    """
    note_end()
    turn, own = next(_turns), dist.get_rank()
    seconds = mesh.timeout if timeout is None else timeout
    board = _Board(turn, seconds, what)
    text = json.dumps([what, thread_name(), mine])
    board.write(own, text)
    ranks = mesh.ranks
    board.wait([rank for rank in ranks if rank != own], remedy, meanwhile)
    values = [
        _checked_value(text if rank == own else board.read(rank), rank, what) for rank in ranks
    ]
    board.clean(own)
    return values


class _Board:
    """The reports of one turn."""

    def __init__(self, turn: int, seconds: float, what: str) -> None:
        self.store, self.turn, self.seconds, self.what = default_store(), turn, seconds, what

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return ask(self.store, question, self.seconds, self.what)
        except StoreError as error:
            raise ExchangeError(str(error)) from None

    def write(self, rank: int, text: str) -> None:
        self._ask(lambda: self.store.set(key_of(f"{self.turn}", rank), text))

    def has(self, *ranks: int) -> bool:
        """Whether all these ranks have reported."""
        keys = [key_of(f"{self.turn}", rank) for rank in ranks]
        return not keys or bool(self._ask(lambda: self.store.check(keys)))

    def read(self, rank: int) -> str:
        return str(self._ask(lambda: self.store.get(key_of(f"{self.turn}", rank))).decode())

    def clean(self, rank: int) -> None:
        """Delete the last turn's report: a rank that is at this turn has read it."""
        self._ask(lambda: self.store.delete_key(key_of(f"{self.turn - 1}", rank)))

    def withdraw(self, rank: int) -> None:
        """Delete this rank's report."""
        self._ask(lambda: self.store.delete_key(key_of(f"{self.turn}", rank)))

    def wait(self, ranks: Sequence[int], remedy: str, meanwhile: Meanwhile | None) -> None:
        """Wait until all these ranks have reported, or one an error."""
        end = time.monotonic() + self.seconds
        look, pause = time.monotonic() + _LOOK, _SOON
        while not self.has(*ranks):
            now = time.monotonic()
            if now >= min(look, end):
                self._look(ranks, remedy if now >= end else None, meanwhile)
                look = now + _LOOK
            time.sleep(pause)
            pause = min(1.5 * pause, _SELDOM)

    def _look(
        self, ranks: Sequence[int], remedy: str | None, meanwhile: Meanwhile | None
    ) -> None:
        """See which ranks are missing, and why; it is too late for them if there is a remedy."""
        missing = [rank for rank in ranks if not self.has(rank)]
        withdraw = functools.partial(self.withdraw, dist.get_rank())
        try:
            if meanwhile is not None:
                meanwhile(missing, withdraw)
        except RankFailed:  # which has ended this exchange for the rank that failed, too
            raise
        except Exception:
            withdraw()
            _turns.next -= 1  # the turn was not taken
            raise
        for rank in ranks:
            if rank not in missing:
                _check_failure(self.read(rank), rank, self.what)
            elif (error := self._ask(functools.partial(end_of, rank))) is not None:
                raise RankFailed(f"rank {rank} has ended with {error}. It did not report {self.what}.")
        if remedy is not None and missing:
            raise ExchangeError(
                f"rank {missing[0]} did not report {self.what} within {self.seconds:g} s. {remedy}"
            )


def _checked_value(text: str, rank: int, what: str) -> Any:
    """The value in a rank's message, which must be about the same exchange and from the same thread."""
    _check_failure(text, rank, what)
    about, thread, value = json.loads(text)
    if about != what:
        raise OutOfStep(
            f"rank {dist.get_rank()} reports {what} while rank {rank} reports {about}: the ranks are at "
            "different calls. Every rank must make the same calls of placed values, in the same order."
        )
    if thread != thread_name():
        raise OutOfStep(
            f"rank {dist.get_rank()} reports {what} in thread {thread_name()}, rank {rank} in thread "
            f"{thread}. Threads may run in a different order on each rank: make all calls of plans and "
            "of placed values from one thread."
        )
    return value


# -- failures ------------------------------------------------------------------------------------------


def _check_failure(text: str, rank: int, what: str) -> None:
    about, _, value = json.loads(text)
    if about == _FAILED:
        raise RankFailed(
            f"rank {rank} raised {value}, while rank {dist.get_rank()} waited for {what}. Nothing of "
            "this call was sent."
        )


def report_failure(mesh: Mesh, text: str) -> int:
    """Report an error in place of this rank's next value; return the number of the exchange."""
    turn = next(_turns)
    _Board(turn, mesh.timeout, "an error").write(
        dist.get_rank(), json.dumps([_FAILED, thread_name(), text])
    )
    return turn


def next_turn() -> int:
    """The number of the next exchange."""
    return _turns.next


def missing_in(mesh: Mesh, turn: int) -> list[int]:
    """The ranks that have not come to an exchange, which this one has ended."""
    board = _Board(turn, mesh.timeout, "an error")
    return [rank for rank in mesh.ranks if rank != dist.get_rank() and not board.has(rank)]


def skip_turn() -> None:
    """Leave out an exchange in which a rank has reported an error, of which this one knows already."""
    next(_turns)


def thread_name() -> str:
    """The name of the running thread, without numbers for threads that Python did not start."""
    name = threading.current_thread().name
    return "Dummy" if name.startswith("Dummy-") else name.replace("\n", " ")[:80]
