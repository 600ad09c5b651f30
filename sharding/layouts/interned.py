"""Classes whose equal objects are one object, so that they are compared and hashed by identity.

Planning looks up layouts, rules and options far more often than it makes new ones (Ershov, "On
programming of arithmetic operations", 1958, called this hash consing).
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakValueDictionary

__all__ = ["Interned"]


class Interned(type):
    """The type of a frozen dataclass whose equal objects are one object.

    Its fields must be hashable. An object lives as long as something else holds it.

    >>> from dataclasses import dataclass
    >>> from torchard.sharding.layouts.interned import Interned
    >>> @dataclass(frozen=True, eq=False)
    ... class Point(metaclass=Interned):
    ...     x: int
    ...     y: int = 0
    >>> Point(1) is Point(x=1, y=0)
    True
    """

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        cls._known: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
        cls._lock = threading.Lock()

        def reduce(made: Any) -> tuple[type, tuple[Any, ...]]:
            return type(made), cls._fields(made)

        cls.__reduce__ = reduce  # type: ignore[assignment]

    def __call__(cls, *args: Any, **named: Any) -> Any:
        if not named:  # what is not given is a default, which the class has as an attribute
            rest = cls.__match_args__[len(args) :]  # type: ignore[attr-defined]
            found = cls._known.get((*args, *map(cls.__dict__.get, rest)) if rest else args)
            if found is not None:
                return found
        made = super().__call__(*args, **named)
        with cls._lock:
            return cls._known.setdefault(cls._fields(made), made)

    def _fields(cls, it: Any) -> tuple[Any, ...]:
        return tuple(getattr(it, name) for name in cls.__match_args__)  # type: ignore[attr-defined]
