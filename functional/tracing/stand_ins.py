"""Values that replace others while a call runs, when arguments and closures are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["any_stand_in", "stand_in", "stand_ins", "standing_in"]

_finds: ContextVar[tuple[Callable[[Any], Any], ...]] = ContextVar("stand-ins", default=())


@contextlib.contextmanager
def standing_in(find: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which ``find`` gives each value's replacement."""
    token = _finds.set((*_finds.get(), find))
    try:
        yield
    finally:
        _finds.reset(token)


def any_stand_in() -> bool:
    """Whether any value may have a replacement now."""
    return bool(_finds.get())


def stand_in(value: Any) -> Any:
    """The current replacement of a value, or the value itself."""
    for find in reversed(_finds.get()):
        value = find(value)
    return value


def stand_ins(values: list[Any]) -> list[Any]:
    """The current replacements of values; the same list if nothing is replaced, as in most calls."""
    return [stand_in(value) for value in values] if _finds.get() else values
