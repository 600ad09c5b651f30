"""Fake tensors: the cache of their results, which torch never bounds, and its log of their errors."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["bound_fake_cache", "fake_errors_unlogged"]

# About 2 KiB each; a trace of a layer with its gradient adds some sixty for each new shape.
_MOST = 16384


def bound_fake_cache() -> None:
    """Empty the cache if it is large.

    Torch has no public function for it. Where another version has none at all, the cache stays as it is:
    long runs over many shapes then grow.
    """
    cache = getattr(FakeTensorMode, "cache", ())
    clear = getattr(FakeTensorMode, "cache_clear", None)
    if len(cache) > _MOST and clear is not None:
        clear()


_unlogged = threading.local()


@contextlib.contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """A context in which this thread does not log errors of operations on fake tensors.

    Torch logs them with its own traceback, and raises them too. Other threads log as before.
    """
    before = getattr(_unlogged, "on", False)
    _unlogged.on = True
    try:
        yield
    finally:
        _unlogged.on = before


# Once and for all, as other threads read the logger's filters at any time.
logging.getLogger(FakeTensorMode.__module__).addFilter(
    lambda record: not (record.exc_info and getattr(_unlogged, "on", False))
)
