"""Locks that can be copied, pickled and forked: the copy, or that of the child, is free."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

__all__ = ["Lock"]


class Lock:
    """A re-entrant lock that can be copied, pickled and forked.

    An object with a lock of threading's cannot be copied or pickled, and in the child of a fork, locks
    held by other threads of the parent are never released.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    def is_held(self) -> bool:
        """Whether this thread holds the lock."""
        held = _release(self._lock)
        if held:
            self._lock.acquire()
        return held

    def __reduce__(self) -> Any:
        return Lock, ()

    def after_fork(self) -> None:
        """In the child of a fork: release the lock, unless the forking thread itself held it."""
        depth = 0
        # Only the owner can release it.
        while _release(self._lock):
            depth += 1
        self._lock = threading.RLock()
        for _ in range(depth):
            self._lock.acquire()


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release(lock: Any) -> bool:
    try:
        lock.release()
    except RuntimeError:
        return False
    return True


def _after_fork() -> None:
    for lock in list(_all):
        lock.after_fork()


os.register_at_fork(after_in_child=_after_fork)
