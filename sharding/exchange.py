"""Small facts told among ranks through the process group's store, with a timeout."""

from __future__ import annotations

import datetime
import itertools
import json
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from torchard.sharding.mesh import Mesh

__all__ = ["ExchangeError", "OutOfStep", "exchange"]


class ExchangeError(RuntimeError):
    """A rank did not tell what the others waited for."""


class OutOfStep(ExchangeError):
    """Ranks make different calls."""


_turns = itertools.count()
# Seconds by which the store may be late with an answer, even with that there is none.
_GRACE = 2.0
# Stores that did not answer.
_silent: list[Any] = []


def exchange(mesh: Mesh, what: str, mine: Any, timeout: float | None = None) -> list[Any]:
    """What every rank of the mesh has to say (JSON), by position in the mesh.

    Every rank must call, in the same order.

    Raises:
        ExchangeError: a rank said nothing for ``timeout`` seconds, or by default ``mesh.timeout``;
            names it and ``what``. Or the store itself does not answer.
        OutOfStep: a rank spoke of something else.
    """
    assert mesh.device_mesh is not None
    store, turn = _store(), next(_turns)
    seconds = mesh.timeout if timeout is None else timeout
    own = dist.get_rank()
    if store in _silent:
        raise _unanswered(what)
    store.set(_key(turn, own), json.dumps([what, mine]))
    ranks: list[int] = mesh.device_mesh.mesh.flatten().tolist()
    told = [mine if r == own else _told(_read(store, turn, r, seconds, what), r, what) for r in ranks]
    # Who has come to this turn has read all of the last one.
    _answer(store, lambda: store.delete_key(_key(turn - 1, own)), seconds, what)
    return told


def _answer(store: Any, question: Callable[[], Any], seconds: float, what: str) -> Any:
    """What the store answers within some seconds.

    Its own timeout is no limit where its host is cut off: what waited then asks the host to forget the
    question, and waits for that answer as long as TCP does (torch 2.13). So another thread does.
    """
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((question(), None))
        except Exception as error:  # raised by who waits for the answer
            answers.put((None, error))

    threading.Thread(target=ask, name="exchange", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds + _GRACE)
    except queue.Empty:
        _silent.append(store)  # the thread has it locked
        raise _unanswered(what) from None
    if error is not None:
        raise error
    return answer


def _unanswered(what: str) -> ExchangeError:
    return ExchangeError(
        f"the store through which ranks tell {what} does not answer: the host that serves it (rank 0's, "
        "or torchrun's) is gone or cannot be reached. End all ranks, and start them again from the last "
        "checkpoint."
    )


def _told(text: str, rank: int, what: str) -> Any:
    about, data = json.loads(text)
    if about != what:
        raise OutOfStep(
            f"rank {dist.get_rank()} tells {what} while rank {rank} tells {about}: the ranks are at "
            "different calls. Every rank must make the same calls of placed values, in the same order."
        )
    return data


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
        raise ExchangeError(f"rank {rank} did not tell {what} within {seconds:g} s.") from error


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # there is no public way to the store
