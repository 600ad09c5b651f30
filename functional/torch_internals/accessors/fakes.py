"""The cache of results of fake tensors, which torch keeps for the whole process without a bound."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["bound_fake_cache"]

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
