"""What one call allocates and which pages it writes, seen from outside, whatever runs it.

A dispatch mode would change what runs: generated code falls back to a program without writes. So
allocations are those of torch's profiler. Pages are those of the system: the memory of a tensor is mapped
privately from a file, and a page is no longer the file's once something is written to it.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import tempfile
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torchard import MeshTensor, tree

__all__ = ["PAGE", "allocations", "mapped", "parts_of", "written"]

PAGE = mmap.PAGESIZE
_PRESENT_OR_SWAPPED, _OF_A_FILE = 3 << 62, 1 << 61  # man 5 proc_pid_pagemap
_MAP_FIXED = 0x10  # at this address; Python's mmap module does not have it
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def allocations(call: Callable[[], Any], least: int) -> list[int]:
    """The sizes of what one call allocates on the CPU, of at least so many bytes, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    assert recorded.profiler is not None
    events = recorded.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return [size for size in sizes if size >= least]


def parts_of(values: Any) -> list[Tensor]:
    """The tensors of a tree; of placed ones, every rank's part."""
    leaves = tree.leaves(values, is_leaf=lambda v: isinstance(v, MeshTensor))
    return [part for v in leaves for part in (v.parts if isinstance(v, MeshTensor) else [v])]


def mapped(values: Any) -> Any:
    """The same tree; the memory of its contiguous tensors is mapped from files."""
    for part in parts_of(values):
        first, count = _inside(part.data_ptr(), part.nbytes)
        with tempfile.TemporaryFile() as file:
            file.write(ctypes.string_at(first * PAGE, count * PAGE))
            file.flush()
            how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
            there = _LIBC.mmap(first * PAGE, count * PAGE, *how, file.fileno(), 0)
            assert there == first * PAGE, ctypes.get_errno()
    return values


def written(address: int, nbytes: int) -> int:
    """How many pages of a mapped tensor were written."""
    first, count = _inside(address, nbytes)
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(8 * first)
        entries = struct.iter_unpack("=Q", pages.read(8 * count))
    return sum(bool(e & _PRESENT_OR_SWAPPED) and not e & _OF_A_FILE for (e,) in entries)


def _inside(address: int, nbytes: int) -> tuple[int, int]:
    """The first of the pages in which there is nothing else, and their number."""
    first = -(-address // PAGE)
    return first, (address + nbytes) // PAGE - first
