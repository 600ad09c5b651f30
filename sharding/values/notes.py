"""Notes that ranks leave for one another in the process group's store, outside of exchanges.

Calls of plans that ranks have agreed on are compared only by messages, without the store. A rank that has
waited in one for a while notes that in the store, for ranks that wait there for its new plan, and for one
that failed before it had a plan. A rank that an error ends notes the error.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from torchard.functional.core.user_lines import of_error
from torchard.functional.torch_internals.accessors.optional import default_store

__all__ = ["LONG", "end_of", "error_text", "key_of", "note_end", "waits_of", "watch"]

# Groups of ranks that compare calls, each with how often this rank has begun to.
Groups = tuple[tuple[tuple[int, ...], int], ...]
# Seconds for which a call is let wait before a note says so.
LONG = 1.0
# The most characters of an error's message.
_LENGTH = 300


def key_of(subject: str, rank: int) -> str:
    """A key of this attempt, as torchrun's store, with all keys, outlives the ranks that it restarts."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"torchard/attempt_{attempt}/{subject}/{rank}"


def error_text(error: BaseException) -> str:
    """An error's type and message, and the user's line that raised it."""
    text, where = f"{type(error).__name__}: {error}"[:_LENGTH].rstrip(), of_error(error)
    return text if where is None else f"{text} ({where})"


def _read(subject: str, rank: int) -> Any:
    """The note of a rank; None if there is none."""
    store, key = default_store(), key_of(subject, rank)
    return json.loads(store.get(key)) if store.check([key]) else None


# -- calls that wait -----------------------------------------------------------------------------------


class _Watch:
    """Notes in the store that this rank's call has waited for others for longer than ``LONG``."""

    def __init__(self) -> None:
        self._groups: Groups | None = None
        self._thread: threading.Thread | None = None

    def begin(self, groups: Groups) -> None:
        """A call begins to wait for the ranks of these groups."""
        if self._thread is None or not self._thread.is_alive():  # a forked process has none
            self._thread = threading.Thread(target=self._run, name="waits", daemon=True)
            self._thread.start()
        self._groups = groups

    def end(self) -> None:
        """It waits no longer."""
        self._groups = None

    def _run(self) -> None:
        seen: Groups | None = None
        noted: Groups | None = None
        while True:
            time.sleep(LONG)
            groups = self._groups
            if groups is not None and groups is seen and groups is not noted:
                with contextlib.suppress(Exception):  # without a store no rank asks
                    default_store().set(key_of("waits", dist.get_rank()), json.dumps(groups))
                noted = groups
            seen = groups


watch = _Watch()


def waits_of(rank: int) -> Sequence[tuple[tuple[int, ...], int]]:
    """The groups for which a rank has waited, and how often it had begun to when it did so."""
    return [(tuple(ranks), count) for ranks, count in _read("waits", rank) or ()]


# -- the end of a rank ---------------------------------------------------------------------------------


@functools.cache
def note_end() -> None:
    """From now on an error that ends this process is noted."""
    atexit.register(_note_end)


def _note_end() -> None:
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is not None:
        with contextlib.suppress(Exception):  # the group, or its store, is gone
            default_store().set(key_of("ended", dist.get_rank()), json.dumps(error_text(error)))


def end_of(rank: int) -> str | None:
    """The error that has ended a rank, if one has."""
    error: str | None = _read("ended", rank)
    return error
