"""Fake tensors: results that are known, torch's cache of them, which it never bounds, and its log."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchard.functional.torch_internals.accessors.pytree import tree_leaves
from torchard.functional.torch_internals.accessors.required import require
from torchard.functional.torch_internals.accessors.tensors import (
    OpOverload,
    is_mutable,
    schema,
    storage_id,
)

__all__ = ["KnownResults", "bound_fake_cache", "fake_errors_unlogged"]

require(torch._C, "_DisableTorchDispatch", "DisableTorchFunction")

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


class KnownResults:
    """The results of operations on fake tensors of one mode, by what is known of their operands.

    torch has such a cache too, also for lists of results and symbolic sizes. This one is for a single
    result, in memory of its own or of the first operand, and takes a fifth of the time.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        self.fakes = fakes
        self.results: dict[Any, tuple[FakeTensor, bool]] = {}

    def run(self, func: Any, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """The result of an operation, which is called if it is unknown, and a second tensor like it.

        Both have the same memory; there is no second one if the operation was called.
        """
        key = _key(func, args, kwargs)
        if key in self.results:
            like, is_view = self.results[key]
            return self._pair(like, args[0] if is_view else None)
        out = call(func, *args, **kwargs)
        if key is None or type(out) is not FakeTensor or not _is_plain(out):
            return out, None
        fakes = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        sharing = [x for x in fakes if storage_id(x) == storage_id(out)]
        is_view = len(sharing) == 1 and sharing[0] is args[0]
        like, _ = self._pair(out, args[0] if is_view else None)
        if is_view == bool(sharing) and _known(like) == _known(out):
            self.results[key] = like, is_view
        return out, None

    def _pair(self, like: FakeTensor, base: FakeTensor | None) -> tuple[FakeTensor, FakeTensor]:
        """Two tensors like another, in memory of their own or in a base's."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            memory = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=_META
            )
            if base is not None:
                memory.set_(base.untyped_storage(), like.storage_offset(), like.shape, like.stride())
        device = like.fake_device
        return FakeTensor(self.fakes, memory, device), FakeTensor(self.fakes, memory, device)


_META = torch.device("meta")


class _Unknown(Exception):
    """An operand of which too little is known."""


def _key(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """All that the result of an operation depends on; None if that is more than can be told."""
    if not _is_pure(func):
        return None
    try:
        return func, torch.get_default_dtype(), _known(args), _known(kwargs)
    except _Unknown:
        return None


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.constant is None and tensor.layout is torch.strided


def _known(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        if not _is_plain(value):
            raise _Unknown
        place = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
        flags = value.requires_grad, value.is_conj(), value.is_neg()
        return place, value.dtype, value.fake_device, flags
    if kind is tuple or kind is list:
        return kind, *map(_known, value)
    if kind is dict:
        return tuple((name, _known(each)) for name, each in value.items())
    if isinstance(value, torch.Tensor):
        raise _Unknown
    return kind, value


@functools.cache
def _is_pure(func: OpOverload) -> bool:
    """Whether an operator of torch has one result, which depends on no values, and writes nothing."""
    kinds = [str(each.type) for each in (*schema(func).returns, *schema(func).arguments[:1])]
    of_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    is_simple = func.namespace in ("aten", "prims") and kinds == ["Tensor", "Tensor"]
    return is_simple and not is_mutable(func) and not of_values.intersection(func.tags)


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
