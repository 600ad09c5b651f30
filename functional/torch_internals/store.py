"""Requests to the process group's store, with a time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["StoreError", "ask"]

# Seconds by which the store's answer, a timeout included, may be late.
_GRACE = 2.0
# Stores that did not answer: they are not asked again.
_silent: list[Any] = []


class StoreError(RuntimeError):
    """The store did not answer."""


def ask(store: Any, question: Callable[[], Any], seconds: float, what: str) -> Any:
    """The store's answer within some seconds; a store that did not answer is not asked again.

    The store's own timeout does not hold if its host is unreachable: the client then cancels the request
    at the host, and waits for the reply as long as TCP does (torch 2.13). So the request runs in a
    thread.

    Args:
        what: the subject of the request, for the error.

    Raises:
        StoreError: the store does not answer.
    """
    if store in _silent:
        raise _unanswered(what)
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def put() -> None:
        try:
            answers.put((question(), None))
        except Exception as error:  # raised in the calling thread
            answers.put((None, error))

    threading.Thread(target=put, name="store", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds + _GRACE)
    except queue.Empty:
        _silent.append(store)  # the thread holds its lock
        raise _unanswered(what) from None
    if isinstance(error, dist.DistNetworkError) and "timeout" not in str(error).lower():
        _silent.append(store)
        raise _unanswered(what) from error
    if error is not None:
        raise error
    return answer


def _unanswered(what: str) -> StoreError:
    return StoreError(
        f"the store through which ranks report {what} does not answer: the host that serves it (rank "
        "0's, or torchrun's) has failed or cannot be reached. Stop all ranks, and restart them from the "
        "last checkpoint."
    )
