"""Ownership: whether anything but the caller's list holds a tensor, or its memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from sys import getrefcount

import torch

from torchard.functional.torch_internals.accessors.tensors import storage_number, storage_uses

__all__ = ["has_one_owner", "held_elsewhere"]

Tensors = Sequence[torch.Tensor]


def has_one_owner(parts: Tensors, i: int) -> bool:
    """Whether nothing but a list holds a tensor."""
    return getrefcount(parts[i]) <= _OWNED


def held_elsewhere(parts: Tensors, positions: Iterable[int]) -> list[int]:
    """The positions of tensors that something but the list holds, or whose memory may have other uses.

    Memory has none if torch owns it, and if it has as many bytes as the tensor's elements.
    """
    others = []
    for i in positions:
        if getrefcount(parts[i]) <= _OWNED:
            storage = parts[i].untyped_storage()
            if (
                storage_uses(storage_number(storage)) == _USES
                and getrefcount(storage) <= _HELD
                and storage.nbytes() == parts[i].nbytes
                and storage.resizable()  # else it is not torch's: an array's, a file's
                and not storage.is_shared()
            ):
                continue
        others.append(i)
    return others


def _counts() -> tuple[int, float, int]:
    """The references to a tensor in a list, and those to its storage, torch's and Python's."""
    parts = [torch.empty(1)]
    storage = parts[0].untyped_storage()
    uses = storage_uses(storage_number(storage))
    return getrefcount(parts[0]), uses, getrefcount(storage)


_OWNED, _USES, _HELD = _counts()
