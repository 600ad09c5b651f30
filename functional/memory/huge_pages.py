"""Memory in huge pages, on a CPU.

A large allocation is new to the process: the first access to each of its pages is a fault, and with pages
of 4 KiB the faults take longer than most kernels. Huge pages are 512 times fewer. Linux provides them on
request (`madvise`), unless the administrator has disabled that; torch requests them for all of its memory
if THP_MEM_ALLOC_ENABLE=1 is set when it starts, and by default does not.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

__all__ = ["in_huge_pages"]


def in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose memory the system is asked to provide in huge pages."""
    advise = _advise()
    if advise is not None:
        page = mmap.PAGESIZE
        start = -(-tensor.data_ptr() // page) * page
        advise(start, max(tensor.data_ptr() + tensor.nbytes - start, 0) // page * page)
    return tensor


@functools.cache
def _advise() -> Callable[[int, int], object] | None:
    """A function that requests huge pages for a range; None if unsupported. A refusal is harmless."""
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
