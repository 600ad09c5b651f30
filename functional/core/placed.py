"""Placed objects: one global value, held as several tensors of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["Facts", "Lift", "Placed", "is_placed", "lift_in_trace", "lifts"]

Lift = Callable[[Any], torch.Tensor]


class Facts(NamedTuple):
    """What a placed object says of its value; all but its parts, ``[:4]``, is what a trace depends on.

    Attributes:
        shape, dtype, device: of the global value.
        placement: how it is held, a `Placement` (program.py).
        parts: the tensors that hold it.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    placement: Any
    parts: tuple[torch.Tensor, ...]


class Placed(Protocol):
    """A leaf that stands for one global value. Its class is asked for these methods, never the object."""

    def __torchard_placed__(self) -> Facts:
        """What it holds, and how."""

    def __torchard_donate__(self) -> None:
        """Let go of the parts: the call that was given them holds them alone."""


class _PlacedTypes(dict[type, bool]):
    """Asked for every node of every call's arguments, so each type is looked into once."""

    def __missing__(self, kind: type) -> bool:
        found = self[kind] = hasattr(kind, "__torchard_placed__")
        return found


_placed_types = _PlacedTypes()


def is_placed(value: Any) -> bool:
    """Whether a leaf is a placed object."""
    return _placed_types[type(value)]


_lifting: list[Callable[[], Lift | None]] = []


def lifts(current: Callable[[], Lift | None]) -> None:
    """Say how a trace in progress turns a placed object into its operand; said once, by who traces."""
    _lifting[:] = [current]


def lift_in_trace() -> Lift | None:
    """What gives the operand of a placed object in the trace in progress; None outside of one."""
    return _lifting[0]() if _lifting else None
