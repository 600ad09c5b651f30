"""Ownership: whether anything but the caller's list holds a tensor, or its memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from torchard.functional.torch_internals.accessors.tensors import storage_uses

__all__ = ["has_one_owner", "is_owned"]

Tensors = Sequence[torch.Tensor]


def has_one_owner(parts: Tensors, i: int) -> bool:
    """Whether nothing but a list holds a tensor."""
    return sys.getrefcount(parts[i]) <= _OWNED


def is_owned(parts: Tensors, i: int) -> bool:
    """Whether nothing but a list holds a tensor, and its memory, of as many bytes as its elements."""
    if not has_one_owner(parts, i):
        return False
    part = parts[i]
    storage = part.untyped_storage()
    return (
        storage_uses(storage) == _USES
        and sys.getrefcount(storage) <= _HELD
        and storage.resizable()  # else it is not torch's: an array's, a file's
        and not storage.is_shared()
        and storage.nbytes() == part.nbytes
    )


def _counts() -> tuple[int, int, int]:
    """The references to a tensor in a list, and those to its storage, torch's and Python's."""
    parts = [torch.empty(1)]
    storage = parts[0].untyped_storage()
    uses = storage_uses(storage)
    return sys.getrefcount(parts[0]), -1 if uses is None else uses, sys.getrefcount(storage)


_OWNED, _USES, _HELD = _counts()
