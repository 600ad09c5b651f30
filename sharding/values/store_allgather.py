"""An all_gather of small JSON values through the process group's store, with a timeout."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torchard.functional.torch_internals.accessors.process_groups import default_store
from torchard.functional.torch_internals.store import StoreError, ask
from torchard.sharding.values.mesh import Mesh

__all__ = ["ExchangeError", "OutOfStep", "exchange", "thread_name"]


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
        busy for longer than that: then pass a larger timeout to Mesh (by default it is the process
        group's).
    """


class OutOfStep(ExchangeError):
    """Ranks make different calls, or make the same calls from different threads."""


_turns = itertools.count()
_WAIT_LONGER = (
    "It has ended, or is busy for longer than that: then pass a larger timeout to Mesh (by default it is "
    "the process group's)."
)


def exchange(
    mesh: Mesh, what: str, mine: Any, timeout: float | None = None, remedy: str = _WAIT_LONGER
) -> list[Any]:
    """The JSON values of all ranks of the mesh, in the mesh's order of ranks.

    Every rank must make the same calls, in the same order.

    Args:
        mesh: a mesh of processes.
        what: a description of the value, for messages.
        mine: this rank's value.
        timeout: seconds; by default ``mesh.timeout``.
        remedy: what to do about a rank that sent nothing, for messages.

    Raises:
        ExchangeError: a rank sent nothing within the timeout, or the store does not answer; names the
            rank and ``what``.
        OutOfStep: a rank is at a different exchange, or at this one in a different thread.
    """
    assert mesh.device_mesh is not None
    store, turn = default_store(), next(_turns)
    seconds = mesh.timeout if timeout is None else timeout
    own = dist.get_rank()
    text = json.dumps([what, thread_name(), mine])
    _answer(store, lambda: store.set(_key(turn, own), text), seconds, what)
    ranks: list[int] = mesh.device_mesh.mesh.flatten().tolist()
    values = []
    for rank in ranks:
        try:
            received = text if rank == own else _read(store, turn, rank, seconds, what)
        except _Late as late:
            raise ExchangeError(f"{late} {remedy}") from late.__cause__
        values.append(_checked_value(received, rank, what))
    # A rank that has reached this turn has read all values of the last one.
    _answer(store, lambda: store.delete_key(_key(turn - 1, own)), seconds, what)
    return values


def _answer(store: Any, question: Callable[[], Any], seconds: float, what: str) -> Any:
    try:
        return ask(store, question, seconds, what)
    except StoreError as error:
        raise ExchangeError(str(error)) from None


class _Late(RuntimeError):
    """A rank sent nothing in time."""


def _checked_value(text: str, rank: int, what: str) -> Any:
    """The value in a rank's message, which must be about the same exchange and from the same thread."""
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


def thread_name() -> str:
    """The name of the running thread, without numbers for threads that Python did not start."""
    name = threading.current_thread().name
    return "Dummy" if name.startswith("Dummy-") else name.replace("\n", " ")[:80]


def _key(turn: int, rank: int) -> str:
    """A key of this attempt, as torchrun's store, with all keys, outlives the ranks that it restarts."""
    return f"torchard/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{turn}/{rank}"


def _read(store: Any, turn: int, rank: int, seconds: float, what: str) -> str:
    key = _key(turn, rank)

    def receive() -> bytes:
        store.wait([key], datetime.timedelta(seconds=seconds))
        received: bytes = store.get(key)
        return received

    try:
        return str(_answer(store, receive, seconds, what).decode())
    except ExchangeError:
        raise
    except (RuntimeError, dist.DistError) as error:
        raise _Late(f"rank {rank} did not report {what} within {seconds:g} s.") from error
