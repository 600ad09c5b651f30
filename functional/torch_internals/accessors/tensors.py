"""Storages and version counters of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from torchard.functional.torch_internals.accessors.required import require

__all__ = [
    "VERSION",
    "is_legacy_batched",
    "is_view",
    "storage_id",
    "storage_number",
    "storage_uses",
    "tensor_in_memory_of",
    "valueless",
    "version",
]

require(torch.Tensor, "_is_view", "_make_wrapper_subclass", "_version")
require(torch.UntypedStorage, "_cdata")

VERSION = "_version"
# The version counter of a tensor; RuntimeError for inference tensors, which have none. Autograd relies on
# it, but it is not public. An attrgetter has no Python frame: it is called at every call.
version: Callable[[torch.Tensor], int] = attrgetter(VERSION)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view for autograd; not public."""
    return tensor._is_view()


def is_legacy_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch's older vmap, as autograd's is_grads_batched uses it.

    No version of torch lists its levels; where one cannot tell, none is.
    """
    return bool(_is_legacy(tensor))


_is_legacy: Callable[[torch.Tensor], bool] = getattr(
    torch._C._functorch, "is_legacy_batchedtensor", lambda tensor: False
)


def valueless(kind: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of a subclass that has the shape, dtype and device of another, and no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=like.device)


def storage_id(tensor: torch.Tensor) -> int:
    """A number for a tensor's storage; fake tensors have one too, while their `data_ptr()` is 0.

    It may be reused once the storage is freed.
    """
    return storage_number(tensor.untyped_storage())


def storage_number(storage: torch.UntypedStorage) -> int:
    """The number of a storage."""
    number: int = storage._cdata
    return number


def storage_uses(storage: torch.UntypedStorage) -> int | None:
    """The reference count of a storage, this object included; None if torch does not expose it.

    Without it, no memory is reused.
    """
    return None if _use_count is None else int(_use_count(storage._cdata))


_use_count = getattr(torch._C, "_storage_Use_Count", None)


def tensor_in_memory_of(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A tensor of another's dtype and storage, from its first element on, that is no view for autograd.

    Inductor's code makes its views so; by public functions it takes four times as long.
    """
    if _reinterpret is None:
        empty = torch.empty(0, dtype=base.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), 0, shape, strides)
    made: torch.Tensor = _reinterpret(base, shape, strides, 0)
    return made


_reinterpret = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", None)
