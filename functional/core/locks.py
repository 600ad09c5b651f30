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

    __slots__ = ("__weakref__", "_depth", "_lock", "_owner")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._lock.release()

    def is_held(self) -> bool:
        """Whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    def __reduce__(self) -> Any:
        return Lock, ()

    def after_fork(self) -> None:
        """In the child of a fork: release the lock, unless the forking thread itself held it."""
        depth = self._depth if self.is_held() else 0
        self._lock, self._owner, self._depth = threading.RLock(), None, 0
        for _ in range(depth):
            self.__enter__()


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_all):
        lock.after_fork()


os.register_at_fork(after_in_child=_after_fork)
