"""The environment of a function: everything it reads besides its arguments, when it was traced.

Except for tensors, all of it is baked into a trace: numbers, the functions that are called, lengths of
lists. A cached trace is valid while none of that has changed. There are two checks. The quick one, at
every call: does each slot that was read (a closure cell, an entry, an attribute, a global name) hold the
same object? The thorough one, only if not: does everything reachable have the same structure, with equal
numbers and tensors of the same shapes?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, eq, is_, methodcaller
from typing import Any

from torchard.functional.guards.changes import ReadRecord
from torchard.functional.guards.reachable import reachable
from torchard.functional.guards.slots import contents, is_value, kind_of

__all__ = ["Environment"]

_contents = attrgetter("cell_contents")
# What tells code that torch's grad mode is off: itself, or by whether values require gradients; or that
# inference mode is on.
_GRAD_MODE = frozenset(
    ("is_grad_enabled", "requires_grad", "is_leaf", "grad_fn", "is_inference_mode_enabled")
)
_call = methodcaller("__call__")


class Environment:
    """Everything reachable from a function and its static arguments.

    Attributes:
        structure: equal for environments with the same trace.
        guardable: whether all of it can be compared: not an iterator, which reading would change, nor an
            array of objects, nor more objects than are guarded.
        reads_grad_mode: whether its code may read torch's grad mode or inference mode.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        walk = reachable(roots)
        self.structure = walk.structure
        self.guardable = not walk.unguardable
        self._reads = ReadRecord(walk.reads, walk.unguardable)
        self.reads_grad_mode = not _GRAD_MODE.isdisjoint(walk.met.names)
        # Kept alive: their ids are in the structure.
        self._kept = [value for value in walk.kept if not is_value(value)]
        self._reached = {id(value) for value in walk.kept if is_value(value)}
        slots = walk.slots
        self._empty, self._sets, self._arrays = slots.empty, slots.sets, slots.arrays
        self._cells, self._picks, self._keyed = slots.cells, slots.picks, slots.keyed
        self._values, self._sized = slots.values, slots.sized
        self._gets, self._typed, self._absent = slots.gets, slots.typed, slots.absent
        self._readers = [read for read, _ in slots.facts]
        self._facts = [fact for _, fact in slots.facts]
        self._now = self._read()
        self._keys = [*chain.from_iterable(self._keyed)]
        self._sizes = [*map(len, self._sized)]

    def _read(self) -> list[Any]:
        """The objects in all slots."""
        read = [*map(_contents, self._cells)]
        for pick, owner in self._picks:
            read += pick(owner)
        if self._gets:
            read += map(_call, self._gets)
        if self._typed:
            read += map(type, self._typed)
        if self._values:
            read += chain.from_iterable(self._values)
        return read

    def take_reads(self) -> ReadRecord:
        """What was read, which is then forgotten."""
        reads, self._reads = self._reads, ReadRecord((), ())
        return reads

    def let_go(self) -> None:
        """Drop the tensors in slots, and keep their ids and kinds for later checks."""
        self._now = [_past(value) if is_value(value) else value for value in self._now]

    def reaches(self, tensor: Any) -> bool:
        """Whether the tensor was reached, so that it is the same while slots are unchanged."""
        return id(tensor) in self._reached

    @property
    def state(self) -> object:
        """An object that is replaced whenever the object in a slot is."""
        return self._now

    def unchanged(self) -> bool:
        """Whether every slot holds the same object, or a tensor of the same kind as before."""
        try:
            if any(self._empty):
                return False
            if self._readers and [*map(_call, self._readers)] != self._facts:
                return False
            for keys, names in self._absent:
                if not keys.isdisjoint(names):
                    return False
            if self._sized and [*map(len, self._sized)] != self._sizes:
                return False
            if self._keyed and [*chain.from_iterable(self._keyed)] != self._keys:
                return False
            read = self._read()
            if len(read) != len(self._now):
                return False
            if not all(map(is_, read, self._now)):
                replaced = _replaced(self._now, read)
                if replaced is None:
                    return False
                self._reached = {replaced.get(known, known) for known in self._reached}
                self._now = read
            return self._same_contents()
        except (KeyError, AttributeError, ValueError, TypeError, RuntimeError):
            return False  # something is missing, or changes during the check

    def _same_contents(self) -> bool:
        if self._sets and not all(map(eq, *zip(*self._sets, strict=True))):
            return False
        return not self._arrays or all(contents(now) == then for now, then in self._arrays)

    def agrees(self, other: Environment) -> bool:
        """Whether a trace of one environment is valid in the other."""
        return self.structure == other.structure


@dataclass(frozen=True, slots=True)
class _Past:
    """The id and kind of a tensor or placed value that was dropped."""

    id: int
    kind: Any


def _past(value: Any) -> _Past:
    return value if isinstance(value, _Past) else _Past(id(value), kind_of(value))


def _replaced(then: Sequence[Any], now: Sequence[Any]) -> dict[int, int] | None:
    """The ids of replaced values and of their replacements; None if a trace is not valid for these.

    It is valid if only tensors and placed values were replaced, one to one, by others of the same kind,
    as updates of weights do.
    """
    into: dict[int, int] = {}
    for old, new in zip(then, now, strict=True):
        if isinstance(old, _Past) or is_value(old):
            past = _past(old)
            if into.setdefault(past.id, id(new)) != id(new):
                return None
            if old is not new and past.kind != kind_of(new):
                return None
        elif old is not new:
            return None
    return into if len(set(into.values())) == len(into) else None
