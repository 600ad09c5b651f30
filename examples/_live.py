"""Bytes of live storages, measured from outside, whoever holds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchard import tree
from torchard.functional.torch_internals import TorchDispatchMode, storage_id

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """A mode that records which storages are alive after each operation, also those held by C++.

    Args:
        already: tensors that exist before the first operation.

    Attributes:
        seen: for each operation, the bytes of each live storage, by the storage's number.
    """

    def __init__(self, already: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.seen: list[dict[int, int]] = []
        self._live: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._count = 0
        for tensor in already:
            self._meet(tensor)

    def _meet(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, a new one if the storage is new."""
        storage, key = tensor.untyped_storage(), storage_id(tensor)
        known = self._live.get(key)
        if known is None or known[0].expired():  # an address may be reused
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
        """The most bytes alive after any operation, without those of some tensors."""
        excluded = {self._meet(tensor) for tensor in without}
        return max(
            sum(size for number, size in live.items() if number not in excluded)
            for live in self.seen
        )
