"""Limits for what may hang: they watch what processes compute, not the clock, which runs for others too.

On a busy machine everything takes long, and still gets on; what hangs computes nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["Own", "Watch", "computed"]

# Of the time that a process may be idle, the part that counts as idle though it computes: who waits
# for others looks after them now and then.
LOOKING = 1 / 60


class Watch:
    """Tells when processes hang.

    Args:
        seconds: of the clock in which they may compute next to nothing.
        used: how many seconds of a processor they have used.
        busy: how many of them they may use in all; by default as many as `seconds`.
        clock: what time it is, in seconds.
    """

    def __init__(
        self,
        seconds: float,
        used: Callable[[], float],
        busy: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self.used, self.clock = seconds, used, clock
        self.busy = seconds if busy is None else busy
        self._began = self._last = used()
        self._since = clock()

    def hangs(self) -> str:
        """What is wrong, to be asked now and then; "" if all is well."""
        used, now = self.used(), self.clock()
        if used - self._began > self.busy:
            return f"has used {used - self._began:.0f} seconds of a processor"
        if abs(used - self._last) > self.seconds * LOOKING:  # less, too: a process has ended
            self._last, self._since = used, now
        if now - self._since > self.seconds:
            return f"has computed next to nothing for {now - self._since:.0f} seconds"
        return ""


class Own:
    """What this process and those that it started have computed, without what it takes to look."""

    def __init__(self) -> None:
        self._looking = 0.0

    def __call__(self) -> float:
        began = time.thread_time()
        used = computed(os.getpid()) - self._looking
        self._looking += time.thread_time() - began
        return used


def computed(pid: int) -> float:
    """Seconds of a processor that a process has used, with all that it started."""
    used = _used(pid)
    if used is None:  # it has ended, or there is no /proc: the process itself at least
        return sum(os.times()[:4]) if pid == os.getpid() else 0.0
    return used + sum(map(computed, _children(pid)))


def _used(pid: int) -> float | None:
    """By a process and its ended children."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return sum(map(int, text.rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> Iterator[int]:
    """Those that live, whichever thread started them; every test asks, so others are not read."""
    for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            yield from map(int, (thread / "children").read_text().split())
