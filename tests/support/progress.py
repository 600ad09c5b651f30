"""Limits for what may hang: they watch what processes compute, not the clock, which runs for others too.

On a busy machine everything takes long, and still gets on; what hangs computes nothing.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
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
    times, children = _processes()
    if pid not in times:  # without /proc, the process itself at least
        return sum(os.times()[:4]) if pid == os.getpid() else 0.0
    total, left = 0.0, [pid]
    while left:
        pid = left.pop()
        total += times[pid]
        left += children[pid]
    return total


def _processes() -> tuple[dict[int, float], dict[int, list[int]]]:
    """The seconds of each process, those of ended children included, and its living children."""
    times: dict[int, float] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        fields = text.rpartition(")")[2].split()
        pid = int(path.parent.name)
        times[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        children[int(fields[1])].append(pid)
    return times, children
