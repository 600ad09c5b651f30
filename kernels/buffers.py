"""Fresh memory for large results on a CPU.

A large allocation is new to the process: the first touch of each of its pages is a fault, and with pages
of 4 KiB these take longer than computing what most kernels do. In huge pages there are 512 times fewer.
Linux gives them to whoever asks (`madvise`), where the administrator has not said otherwise; torch asks
for all of its memory if THP_MEM_ALLOC_ENABLE=1 is set when it starts, and by default does not.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Buffers", "is_large"]

# Bytes: below, allocations come from memory that the process has had before.
LARGE = 1 << 22


def is_large(tensor: torch.Tensor) -> bool:
    """Whether it is worth asking for pages."""
    return tensor.nbytes >= LARGE


@dataclass(frozen=True)
class Buffers:
    """Tensors of known shapes, strides and dtypes, made on demand."""

    likes: tuple[torch.Tensor, ...]

    @staticmethod
    def of(values: Sequence[torch.Tensor]) -> Buffers:
        return Buffers(
            tuple(
                torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
                for v in values
            )
        )

    @property
    def any_large(self) -> bool:
        return any(map(is_large, self.likes))

    @property
    def dense(self) -> bool:
        """Whether each element has one place, and all places are theirs."""
        return all(torch.empty_like(like).stride() == like.stride() for like in self.likes)

    def new(self, device: torch.device) -> list[torch.Tensor]:
        """Nothing is in them yet."""
        return [_in_huge_pages(_empty(like, device)) for like in self.likes]


def _empty(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def _in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    advise = _advise()
    if advise is not None and is_large(tensor) and tensor.device.type == "cpu":
        page = mmap.PAGESIZE
        start = -(-tensor.data_ptr() // page) * page
        advise(start, (tensor.data_ptr() + tensor.nbytes - start) // page * page)
    return tensor


@functools.cache
def _advise() -> Callable[[int, int], object] | None:
    """Asks for huge pages from an address on; None where there are none. A refusal changes nothing."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None

    def ask(start: int, length: int) -> object:
        return madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))

    return ask
