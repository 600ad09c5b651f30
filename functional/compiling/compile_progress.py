"""Progress of compiling, shown once it takes more than a few seconds.

A program may have several parts, each compiled when it is first called (regions.py). On a terminal with
tqdm installed there is a bar on standard error; otherwise a line for each part is logged, by
``torchard.jit`` at level INFO. Of several ranks the first one shows it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

__all__ = ["CompileProgress"]

_LOG = logging.getLogger("torchard.jit")
_PATIENCE = 3.0  # seconds without a message
_REFRESH = 1.0  # seconds between two states of the bar's clock


class CompileProgress:
    """How many parts of a program are compiled.

    Args:
        name: the program's name.

    Attributes:
        total: the number of parts.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.total = self.done = 0
        self._spent = 0.0
        self._bar: Any = None

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        """A context in which one part is compiled."""
        ended, began = threading.Event(), time.monotonic()
        watch = threading.Thread(target=self._watch, args=(ended,), daemon=True)
        watch.start()
        finished = False
        try:
            yield
            finished = True
        finally:
            ended.set()
            watch.join()
            self._spent += time.monotonic() - began
            self.done += 1
            if self._bar is not None:
                self._bar.update()
                if self.done >= self.total or not finished:
                    self._bar.close()
                    self._bar = None

    def _watch(self, ended: threading.Event) -> None:
        """Show the progress, if the part does not end soon."""
        if ended.wait(max(_PATIENCE - self._spent, 0)) or os.environ.get("RANK", "0") != "0":
            return
        total = max(self.total, self.done + 1)  # inputs of other strides are compiled for again
        self._bar = self._bar or _bar(self.name, self.done, total)
        if self._bar is None:
            _LOG.info("compiling %s: part %d of %d", self.name, self.done + 1, total)
            return
        while not ended.wait(_REFRESH):
            self._bar.refresh()


def _bar(name: str, done: int, total: int) -> Any:
    """A progress bar; None if there is no terminal, or no tqdm."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm(desc=f"compiling {name}", initial=done, total=total, unit="part", leave=False)
