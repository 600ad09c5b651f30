"""Arenas: the memory that planned programs run in, lent to one call at a time.

There is one arena, shared by all programs of the process. It has a block for each call that runs at the
same time: of another thread, or from within a call. A block has memory on each device that a program
needs, as much as the largest program that ran in it needs, and stays; so programs of several shapes take
turns in the same memory. Blocks are freed when no planned program is left, or by `release`.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from torchard.functional import torch_internals as internals
from torchard.functional.memory.huge_pages import in_huge_pages

__all__ = ["Arena", "Block", "arena", "release", "reserved"]

T = TypeVar("T")
# The number of blocks that are kept besides the block in use, for other threads and open graphs.
_SURPLUS = 4
Sizes = Mapping[torch.device, int]


class Block:
    """Memory for one call at a time, and for values that the call leaves to a later call.

    Attributes:
        memory: the bytes, by device.
    """

    def __init__(self, sizes: Sizes) -> None:
        with internals.no_modes(), torch.no_grad(), torch.inference_mode(False):
            self.memory = {device: _bytes(size, device) for device, size in sizes.items()}
        self.streams = _streams(sizes)
        self.lent = False
        # The storage of what a call left, and the program that was called.
        self._lease: torch.UntypedStorage | None = None
        self._program: weakref.ref[Any] | None = None
        self._left: list[Any] = []
        # What programs made of this memory, by program.
        self._made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def __enter__(self) -> Block:
        return self

    def __exit__(self, *error: object) -> None:
        """The call to which it was lent has ended."""
        self.lent = False

    def is_free(self) -> bool:
        """Whether no call runs in it, and nothing that one left in it is referred to."""
        return not self.lent and self.leased() == 0

    def leave(self, program: Any, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a call leaves; the block is not free until nothing refers to them.

        Args:
            values: tensors in the block, all on one device.

        Returns:
            Tensors of the same memory, in one storage of their own.
        """
        (device,) = {value.device for value in values}
        self._lease = from_dlpack(self.memory[device]).untyped_storage()
        self._program = weakref.ref(program)
        start = self.memory[device].data_ptr()
        left = [_in_storage(self._lease, value, value.data_ptr() - start) for value in values]
        self._left = [_identity(value) for value in left]
        return left

    def leased(self) -> float:
        """The number of references to what a call left: tensors, and Python's to the storage."""
        if self._lease is None:
            return 0
        uses = internals.storage_uses(internals.storage_number(self._lease))
        own = _OWN if uses == 1 else _OWN_SHARED
        return uses - 1 + sys.getrefcount(self._lease) - own

    def has_left(self, program: Any, values: Mapping[int, torch.Tensor]) -> bool:
        """Whether a call of a program left these tensors, by their positions, and no others are alive."""
        return (
            self._program is not None
            and self._program() is program
            and self.leased() == len(values)
            and all(self._left[i] == _identity(value) for i, value in values.items())
        )

    def take_back(self) -> None:
        """Note that the tensors that a call left are no longer needed."""
        self._lease = self._program = None
        self._left = []

    def fits(self, program: Any, sizes: Sizes) -> bool:
        """Whether a program of these sizes can run in it, after what runs in it now."""
        if not self.streams and program in self._made:
            return True  # as it did before
        ordered = _streams(sizes) == self.streams
        return ordered and all(self.size(device) >= size for device, size in sizes.items())

    def size(self, device: torch.device) -> int:
        """Its bytes on a device."""
        return self.memory[device].numel() if device in self.memory else 0

    def made_for(self, program: Any, make: Callable[[Mapping[torch.device, torch.Tensor]], T]) -> T:
        """The objects that a program creates from this memory, once; kept as long as both exist."""
        made = self._made.get(program)
        if made is None:
            made = self._made[program] = make(self.memory)
        result: T = made
        return result


def _streams(sizes: Sizes) -> dict[torch.device, Any]:
    """The stream of each accelerator that the next operation is put on.

    A block is lent again while the kernels of its last call may still run, which those of another stream
    would not wait for.
    """
    others = (device for device in sizes if device.type != "cpu")
    return {device: torch.accelerator.current_stream(device) for device in others}


class _Held:
    """A storage as a block holds it."""

    def __init__(self) -> None:
        self.storage = torch.empty(1).untyped_storage()


def _own_references() -> tuple[int, int]:
    """Python's references to a storage that one object holds: without tensors, and with some.

    torch holds one while there are tensors (torch 2.13).
    """
    held = _Held()
    alone = sys.getrefcount(held.storage)
    tensor = torch.empty(0).set_(held.storage)
    shared = sys.getrefcount(held.storage)
    del tensor
    return alone, shared


_OWN, _OWN_SHARED = _own_references()


def _identity(value: torch.Tensor) -> Any:
    """What two tensors of the same values in the same memory have in common."""
    return value.data_ptr(), internals.storage_id(value), value.shape, value.stride(), value.dtype


def _in_storage(
    storage: torch.UntypedStorage, like: torch.Tensor, start: int
) -> torch.Tensor:
    """A tensor in a storage, from some byte on."""
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    offset = start // like.element_size() if like.numel() else 0
    return empty.set_(storage, offset, like.shape, like.stride())


def _bytes(size: int, device: torch.device) -> torch.Tensor:
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    return in_huge_pages(memory) if device.type == "cpu" else memory


class Arena:
    """The blocks of one process."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._lock = threading.Lock()
        self._programs: set[int] = set()

    def lent(self, program: Any, sizes: Sizes) -> Block:
        """A block for a call of a program, lent until its context is left.

        Args:
            sizes: the bytes that it needs, by device.
        """
        with self._lock:
            if id(program) not in self._programs:
                self._programs.add(id(program))
                weakref.finalize(program, self._left, id(program))
            free = (block for block in self._blocks if block.is_free())
            block = next((each for each in free if each.fits(program, sizes)), None)
            block = block or self._added(sizes)
            block.lent = True
            if len(self._blocks) > _SURPLUS:
                self._drop_surplus()
        return block

    @contextmanager
    def resumed(self, program: Any, values: Mapping[int, torch.Tensor]) -> Iterator[Block | None]:
        """The block in which a call of a program left values, by their positions.

        None: something else refers to it too, or they are not what the call left.
        """
        with self._lock:
            idle = (block for block in self._blocks if not block.lent)
            block = next((each for each in idle if each.has_left(program, values)), None)
            if block is not None:
                block.lent = True
        if block is None:
            yield None
            return
        with block:
            try:
                yield block
            finally:
                block.take_back()

    def _added(self, sizes: Sizes) -> Block:
        """A new block, in the place of one that is too small."""
        wanted, streams = dict(sizes), _streams(sizes)
        free = [block for block in self._blocks if block.is_free()]
        small = next((each for each in free if each.streams.items() <= streams.items()), None)
        if small is not None:
            self._blocks.remove(small)
            free.remove(small)
            for device in small.memory:
                wanted[device] = max(wanted.get(device, 0), small.size(device))
            del small  # its memory is free before there is more
        block = Block(wanted)
        self._blocks.append(block)
        return block

    def _drop_surplus(self) -> None:
        for surplus in [block for block in self._blocks if block.is_free()][_SURPLUS:]:
            self._blocks.remove(surplus)

    def _left(self, program: int) -> None:
        """A program is gone; without programs nothing is kept.

        Called by the garbage collector at any time: also while this thread, or another, has the lock, and
        before what the program's last call left is freed. That keeps its memory itself, and no program
        can take it back: the block is dropped all the same.
        """
        self._programs.discard(program)
        if not self._programs and self._lock.acquire(blocking=False):
            try:
                self._blocks = [block for block in self._blocks if block.lent]
            finally:
                self._lock.release()

    def release(self) -> None:
        """Free the blocks that are not in use."""
        with self._lock:
            self._blocks = [block for block in self._blocks if not block.is_free()]

    def reserved(self) -> dict[torch.device, int]:
        """The bytes of all blocks, by device."""
        blocks = list(self._blocks)  # without the lock, which would keep `_left` from its work
        devices = {device for block in blocks for device in block.memory}
        return {device: sum(b.size(device) for b in blocks) for device in devices}

    def after_fork(self) -> None:
        """Reset in the child of a fork: calls of the parent, of this thread too, have blocks."""
        self._lock = threading.Lock()
        self._blocks = []


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
