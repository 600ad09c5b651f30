"""Arenas: the memory that planned programs run in, lent to one call at a time.

There is one arena for each device, shared by all programs of the process. It has a block for each call
that runs at the same time: of another thread, or from within a call. A block is as large as the largest
program that ran in it needs, and stays; so programs of several shapes take turns in the same memory.
Blocks are freed when no planned program is left, or by `release`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.memory.huge_pages import in_huge_pages

__all__ = ["Arena", "Block", "arena", "release", "reserved"]

T = TypeVar("T")
Sizes = Mapping[torch.device, int]


class Block:
    """Memory for one call at a time.

    Attributes:
        memory: by device, the bytes.
    """

    def __init__(self, sizes: Sizes) -> None:
        with internals.no_modes(), torch.no_grad(), torch.inference_mode(False):
            self.memory = {device: _bytes(size, device) for device, size in sizes.items()}
        self.lent = False
        # What programs made of this memory, by program.
        self._made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def fits(self, sizes: Sizes) -> bool:
        """Whether a program of these sizes can run in it."""
        return all(self.size(device) >= size for device, size in sizes.items())

    def size(self, device: torch.device) -> int:
        """Its bytes on a device."""
        return self.memory[device].numel() if device in self.memory else 0

    def made_for(self, program: Any, make: Callable[[Mapping[torch.device, torch.Tensor]], T]) -> T:
        """What a program makes of this memory, once; kept as long as both exist."""
        made = self._made.get(program)
        if made is None:
            made = self._made[program] = make(self.memory)
        result: T = made
        return result


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return in_huge_pages(memory) if device.type == "cpu" else memory


class Arena:
    """The blocks of one process."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._lock = threading.Lock()
        self._programs: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def lent(self, program: Any, sizes: Sizes) -> Iterator[Block]:
        """A block for a call of a program.

        Args:
            sizes: the bytes that it needs, by device.
        """
        block = self._take(program, sizes)
        try:
            yield block
        finally:
            with self._lock:
                block.lent = False

    def _take(self, program: Any, sizes: Sizes) -> Block:
        with self._lock:
            if program not in self._programs:
                self._programs.add(program)
                weakref.finalize(program, self._left)
            free = [block for block in self._blocks if not block.lent]
            block = next((each for each in free if each.fits(sizes)), None)
            if block is None:
                block = self._grown(free, sizes)
            block.lent = True
            return block

    def _grown(self, free: list[Block], sizes: Sizes) -> Block:
        """A new block, in the place of one that is too small."""
        wanted = dict(sizes)
        for small in free[:1]:
            self._blocks.remove(small)
            free.remove(small)
            for device in small.memory:
                wanted[device] = max(wanted.get(device, 0), small.size(device))
            del small
        block = Block(wanted)
        self._blocks.append(block)
        return block

    def _left(self) -> None:
        """A program is gone; without programs nothing is kept."""
        if not self._programs:
            self.release()

    def release(self) -> None:
        """Free the blocks that are not in use."""
        with self._lock:
            self._blocks = [block for block in self._blocks if block.lent]

    def reserved(self) -> dict[torch.device, int]:
        """The bytes of all blocks, by device."""
        with self._lock:
            devices = {device for block in self._blocks for device in block.memory}
            return {device: sum(b.size(device) for b in self._blocks) for device in devices}

    def after_fork(self) -> None:
        """Reset in the child of a fork, where no other thread of the parent runs."""
        self._lock = threading.Lock()
        for block in self._blocks:
            block.lent = False


arena = Arena()
os.register_at_fork(after_in_child=arena.after_fork)


def release() -> None:
    """Free the memory of planned programs that are not running; the next call reserves it again.

    >>> from torchard.functional.memory.arena import release
    >>> release()
    """
    arena.release()


def reserved() -> dict[torch.device, int]:
    """The bytes that are reserved for planned programs, by device."""
    return arena.reserved()
