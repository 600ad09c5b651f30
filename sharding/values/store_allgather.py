"""An all_gather of small JSON values through the process group's store, with a timeout."""

from __future__ import annotations

import datetime
import itertools
import json
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
    torchard.ExchangeError: rank 1 did not tell what it passed to place within 1 s. It has ended, or is
        busy for longer than that: then pass a larger timeout to Mesh (by default it is the process
        group's).
    """


class OutOfStep(ExchangeError):
    """Ranks make different calls, or make them from different threads."""


_turns = itertools.count()
_WAIT_LONGER = (
    "It has ended, or is busy for longer than that: then pass a larger timeout to Mesh (by default it is "
    "the process group's)."
)


def exchange(
    mesh: Mesh, what: str, mine: Any, timeout: float | None = None, remedy: str = _WAIT_LONGER
) -> list[Any]:
    """Gather one JSON value from every rank of the mesh, by position in the mesh.

    Every rank must call, in the same order.

    Args:
        what: what the value is about, for messages.
        remedy: what to do about a rank that sent nothing, for messages.

    Raises:
        ExchangeError: a rank sent nothing for ``timeout`` seconds, or by default ``mesh.timeout``;
            names it and ``what``. Or the store itself does not answer.
        OutOfStep: a rank is at a different exchange.
    """
    assert mesh.device_mesh is not None
    store, turn = default_store(), next(_turns)
    seconds = mesh.timeout if timeout is None else timeout
    own = dist.get_rank()
    text = json.dumps([what, thread_name(), mine])
    _answer(store, lambda: store.set(_key(turn, own), text), seconds, what)
    ranks: list[int] = mesh.device_mesh.mesh.flatten().tolist()
    told = []
    for rank in ranks:
        try:
            heard = text if rank == own else _read(store, turn, rank, seconds, what)
        except _Late as late:
            raise ExchangeError(f"{late} {remedy}") from late.__cause__
        told.append(_told(heard, rank, what))
    # A rank that has reached this turn has read all values of the last one.
    _answer(store, lambda: store.delete_key(_key(turn - 1, own)), seconds, what)
    return told


def _answer(store: Any, question: Callable[[], Any], seconds: float, what: str) -> Any:
    try:
        return ask(store, question, seconds, what)
    except StoreError as error:
        raise ExchangeError(str(error)) from None


class _Late(RuntimeError):
    """A rank sent nothing in time."""


def _told(text: str, rank: int, what: str) -> Any:
    about, thread, data = json.loads(text)
    if about != what:
        raise OutOfStep(
            f"rank {dist.get_rank()} tells {what} while rank {rank} tells {about}: the ranks are at "
            "different calls. Every rank must make the same calls of placed values, in the same order."
        )
    if thread != thread_name():
        raise OutOfStep(
            f"rank {dist.get_rank()} tells {what} in thread {thread_name()}, rank {rank} in thread "
            f"{thread}. Threads run in any order, on each rank in another one: let one thread make all "
            "calls of plans and of placed values."
        )
    return data


def thread_name() -> str:
    """The name of the running thread, without numbers for threads that Python did not start."""
    name = threading.current_thread().name
    return "Dummy" if name.startswith("Dummy-") else name.replace("\n", " ")[:80]


def _key(turn: int, rank: int) -> str:
    return f"torchard/{turn}/{rank}"


def _read(store: Any, turn: int, rank: int, seconds: float, what: str) -> str:
    key = _key(turn, rank)

    def heard() -> bytes:
        store.wait([key], datetime.timedelta(seconds=seconds))
        told: bytes = store.get(key)
        return told

    try:
        return str(_answer(store, heard, seconds, what).decode())
    except ExchangeError:
        raise
    except (RuntimeError, dist.DistError) as error:
        raise _Late(f"rank {rank} did not tell {what} within {seconds:g} s.") from error
