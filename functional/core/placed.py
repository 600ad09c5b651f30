"""Placed objects: one global value, held as several tensors of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["Facts", "Lift", "Placed", "is_placed", "lift_in_trace", "lifts"]

Lift = Callable[[Any], torch.Tensor]


class Facts(NamedTuple):
    """The description of a placed object; a trace depends on ``[:4]``, all except the parts.

    Attributes:
        shape, dtype, device: those of the global value.
        placement: a `Placement` (program.py): how the value is held.
        parts: the tensors that hold it.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    placement: Any
    parts: tuple[torch.Tensor, ...]


class Placed(Protocol):
    """A leaf that represents one global value. These methods are looked up on its class only."""

    def __torchard_placed__(self) -> Facts:
        """The value's facts and parts."""

    def __torchard_donate__(self) -> None:
        """Drop the parts, so that the call that took them is their only owner."""


class _PlacedTypes(dict[type, bool]):
    """A cache: every node of every call's arguments is tested, but each type inspected once."""

    def __missing__(self, kind: type) -> bool:
        has_method = self[kind] = hasattr(kind, "__torchard_placed__")
        return has_method


_placed_types = _PlacedTypes()


def is_placed(value: Any) -> bool:
    """Whether a leaf is a placed object."""
    return _placed_types[type(value)]


_lifting: list[Callable[[], Lift | None]] = []


def lifts(current: Callable[[], Lift | None]) -> None:
    """Register the function that returns how a trace in progress lifts placed objects. Called once."""
    _lifting[:] = [current]


def lift_in_trace() -> Lift | None:
    """The function from a placed object to its operand in the trace in progress; None outside of one."""
    return _lifting[0]() if _lifting else None
