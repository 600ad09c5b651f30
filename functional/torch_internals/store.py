"""The process group's store, asked with a limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["StoreError", "ask"]

# Seconds by which the store may be late with an answer, even with that there is none.
_GRACE = 2.0
# Stores that did not answer.
_silent: list[Any] = []


class StoreError(RuntimeError):
    """The store did not answer."""


def ask(store: Any, question: Callable[[], Any], seconds: float, what: str) -> Any:
    """What the store answers within some seconds; a store that was silent, or gone, is not asked again.

    Its own timeout is no limit where its host is cut off: what waited then asks the host to forget the
    question, and waits for that answer as long as TCP does (torch 2.13). So another thread does.

    Args:
        what: it is asked about, for the error.

    Raises:
        StoreError: it does not answer.
    """
    if store in _silent:
        raise _unanswered(what)
    answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def put() -> None:
        try:
            answers.put((question(), None))
        except Exception as error:  # raised by who waits for the answer
            answers.put((None, error))

    threading.Thread(target=put, name="store", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds + _GRACE)
    except queue.Empty:
        _silent.append(store)  # the thread has it locked
        raise _unanswered(what) from None
    if isinstance(error, dist.DistNetworkError) and "timeout" not in str(error).lower():
        _silent.append(store)
        raise _unanswered(what) from error
    if error is not None:
        raise error
    return answer


def _unanswered(what: str) -> StoreError:
    return StoreError(
        f"the store through which ranks tell {what} does not answer: the host that serves it (rank 0's, "
        "or torchrun's) is gone or cannot be reached. End all ranks, and start them again from the last "
        "checkpoint."
    )
