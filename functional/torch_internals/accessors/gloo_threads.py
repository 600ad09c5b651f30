"""Threads of gloo's, known by their names; where no thread has them, nothing is done."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["let_gloo_wait"]

_LOOP = "gloo_tcp_loop"


def let_gloo_wait() -> None:
    """From now on no thread that moves gloo's messages displaces one that computes (``SCHED_BATCH``).

    A message wakes such a thread. If it displaces one that holds the lock of the connection, it asks for
    the lock again and again (gloo/transport/tcp/pair.cc, ``handleEvents``) until the scheduler's next
    tick: on two cores with two ranks, a fourth of all collectives of 0.2 ms took up to 4 ms.

    Threads that are created later are not affected; neither are those with a policy of their own, nor
    systems without this policy, or on which a process may not choose it.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or this is not allowed
            number = int(thread.name)
            if (thread / "comm").read_text().strip() != _LOOP:
                continue
            if os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
