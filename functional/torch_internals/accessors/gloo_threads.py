"""Threads of gloo's, known by their names; where no thread has them, nothing is done."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["let_gloo_wait"]

_LOOP = b"gloo_tcp_loop"


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
    for thread in _threads():
        with contextlib.suppress(OSError):  # it has ended, or this is not allowed
            name = Path(f"/proc/self/task/{thread}/comm").read_bytes()  # in any encoding, or cut
            if name.strip() == _LOOP and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> list[int]:
    """The threads of this process; none where /proc is absent, or numbers them as another namespace."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):
            return [int(thread) for thread in os.listdir("/proc/self/task")]
    return []
