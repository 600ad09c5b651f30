"""Bytes that are alive, counted from outside: of every storage, whoever holds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchard import tree
from torchard.functional.torch_internals import TorchDispatchMode, storage_id

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Which storages are alive after each operation, those that C++ holds among them.

    Attributes:
        seen: after each operation, bytes by the number of the storage.
    """

    def __init__(self, already: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.seen: list[dict[int, int]] = []
        self._live: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._count = 0
        for tensor in already:
            self._meet(tensor)

    def _meet(self, tensor: torch.Tensor) -> int:
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        known = self._live.get(key)
        if known is None or known[0].expired():  # an address may be given out again
            self._count += 1
            known = StorageWeakRef(storage), storage.nbytes(), self._count
            self._live[key] = known
        return known[2]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree.leaves(out):
            if isinstance(value, torch.Tensor):
                self._meet(value)
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        self.seen.append({number: size for _, size, number in self._live.values()})
        return out

    def peak(self, without: Iterable[torch.Tensor] = ()) -> int:
        """The most bytes that were alive, those of some tensors not counted."""
        skipped = {self._meet(tensor) for tensor in without}
        return max(sum(n for k, n in at.items() if k not in skipped) for at in self.seen)
