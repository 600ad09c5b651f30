"""Memory that is not in use, overwritten: for tests, in which a value that is read too late is NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["is_poisoned", "poison", "poisoned"]

# Bytes of it are NaN in every floating dtype.
_POISON = 0xFF
_poisoned = False


def is_poisoned() -> bool:
    """Whether programs overwrite memory that is not in use."""
    return _poisoned


@contextmanager
def poisoned() -> Iterator[None]:
    """A context for tests: programs that are planned in it overwrite memory that is not in use."""
    global _poisoned
    before, _poisoned = _poisoned, True
    try:
        yield
    finally:
        _poisoned = before


def poison(memory: torch.Tensor) -> None:
    """Overwrite bytes."""
    memory.fill_(_POISON)
