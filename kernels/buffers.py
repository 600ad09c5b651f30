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
class Layout:
    """How a tensor is stored."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def dense(self) -> bool:
        """Whether each element has one place, and all places up to the last are theirs."""
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Buffers:
    """Tensors made on demand."""

    layouts: tuple[Layout, ...]

    @staticmethod
    def of(values: Sequence[torch.Tensor]) -> Buffers:
        """Stored as these are."""
        return Buffers(tuple(Layout(tuple(v.shape), v.stride(), v.dtype) for v in values))

    @property
    def dense(self) -> bool:
        """Whether all are."""
        return all(layout.dense for layout in self.layouts)

    def new(self, device: torch.device) -> list[torch.Tensor]:
        """Nothing is in them yet."""
        return [
            _in_huge_pages(torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=device))
            for x in self.layouts
        ]


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
