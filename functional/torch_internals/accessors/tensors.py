"""A tensor's memory and its history of writes."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch

from torchard.functional.torch_internals.accessors.required import require

__all__ = ["VERSION", "is_view", "storage_id", "storage_uses", "version"]

require(torch.Tensor, "_is_view", "_version")
require(torch.UntypedStorage, "_cdata")

VERSION = "_version"
# How often a tensor was written to; RuntimeError for one of inference mode, which does not count.
# Autograd relies on it without telling it publicly. No frame of Python's: it is asked at every call.
version: Callable[[torch.Tensor], int] = attrgetter(VERSION)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows it as a view of another tensor; torch tells it by private names only."""
    return tensor._is_view()


def storage_id(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in, by a number that fakes have too, whose `data_ptr()` is 0.

    Another tensor may have it when all of these are gone.
    """
    number: int = tensor.untyped_storage()._cdata
    return number


def storage_uses(storage: torch.UntypedStorage) -> int | None:
    """How many refer to a storage, tensors and this object alike; None if torch does not say.

    Where it does not, no memory is used again.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata))
