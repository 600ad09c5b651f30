"""Values that stand in for others while a call runs, where arguments and closures are read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

__all__ = ["any_stand_in", "stand_in", "stand_ins", "standing_in"]

_finds: ContextVar[tuple[Callable[[Any], Any], ...]] = ContextVar("stand-ins", default=())


@contextlib.contextmanager
def standing_in(find: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which values are what a function finds for them."""
    token = _finds.set((*_finds.get(), find))
    try:
        yield
    finally:
        _finds.reset(token)


def any_stand_in() -> bool:
    """Whether values may have stand-ins now."""
    return bool(_finds.get())


def stand_in(value: Any) -> Any:
    """What stands in for a value now."""
    for find in reversed(_finds.get()):
        value = find(value)
    return value


def stand_ins(values: list[Any]) -> list[Any]:
    """What stands in for values now: the same list, at nearly every call, where nothing does."""
    return [stand_in(value) for value in values] if _finds.get() else values
