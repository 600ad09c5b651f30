"""The mutable things in which a module holds values: what each contains, as a list, and how to set it."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from operator import is_
from types import CellType, FunctionType
from typing import Any

import torch

from torchard.functional.guards.present_cells import is_filled

__all__ = [
    "cells",
    "is_container",
    "is_plain",
    "is_users",
    "mapped",
    "pairs",
    "read",
    "same",
    "write",
]

_PLAIN = (dict, list, set, deque, functools.partial)
# Objects of these packages belong to their library: compiled functions, loggers, locks.
_LIBRARIES = frozenset(
    ("torch", "torchard", "logging", "threading", "functools", "builtins", "collections", "weakref")
)

_EMPTY = object()  # in a slot to which nothing has been assigned


def is_plain(value: Any) -> bool:
    """Whether a value is a container of Python's own, or of a class derived from one."""
    return isinstance(value, _PLAIN)


def is_container(value: Any) -> bool:
    """Whether a value is mutable and `read` knows what it contains."""
    return isinstance(value, _PLAIN) or (is_users(value) and bool(_slots_of(value)))


def is_users(value: Any) -> bool:
    """Whether a value is an object of a class that belongs to no library."""
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return False
    return hasattr(value, "__dict__") or bool(_slots_of(value))


def read(container: Any) -> list[Any]:
    """The contents of a container. A function contains its closure and its defaults."""
    if isinstance(container, dict):
        return [x for pair in _methods(container).items(container) for x in pair]
    if isinstance(container, functools.partial):
        return [container.func, container.args, container.keywords]
    if isinstance(container, FunctionType):
        closed = [x.cell_contents if is_filled(x) else _EMPTY for x in container.__closure__ or ()]
        return [*closed, container.__defaults__, container.__kwdefaults__]
    if isinstance(container, (list, set, deque)):
        return [*_methods(container).__iter__(container)]
    return [getattr(container, name, _EMPTY) for name in _slots_of(container)]


def pairs(contents: list[Any]) -> dict[Any, Any]:
    """The dict with such contents."""
    return dict(zip(contents[::2], contents[1::2], strict=True))


def write(container: Any, contents: list[Any]) -> None:
    """Make a container contain this, in the order of `read`."""
    if isinstance(container, dict):
        _methods(container).clear(container)
        for key, value in pairs(contents).items():
            _methods(container).__setitem__(container, key, value)
    elif isinstance(container, functools.partial):
        container.__setstate__((*contents, vars(container)))  # type: ignore[attr-defined]
    elif isinstance(container, FunctionType):
        *closed, container.__defaults__, container.__kwdefaults__ = contents
        for cell, value in zip(container.__closure__ or (), closed, strict=True):
            if value is not _EMPTY:
                cell.cell_contents = value
            elif is_filled(cell):
                del cell.cell_contents
    elif isinstance(container, (list, set, deque)):
        methods = _methods(container)
        methods.clear(container)
        (methods.update if isinstance(container, set) else methods.extend)(container, contents)
    else:
        for name, value in zip(_slots_of(container), contents, strict=True):
            if value is not _EMPTY:
                object.__setattr__(container, name, value)
            elif hasattr(container, name):
                object.__delattr__(container, name)


def same(container: Any, contents: list[Any]) -> bool:
    """Whether a container has exactly these objects, in this order."""
    now = read(container)
    if len(now) != len(contents):
        return False
    if isinstance(container, set):
        return set(map(id, now)) == set(map(id, contents))
    return all(map(is_, now, contents))


def mapped(value: Any, find: Callable[[Any], Any]) -> Any:
    """What a function finds for a value, or a tuple of what it finds for those in a tuple."""
    if not isinstance(value, (tuple, frozenset)) or isinstance(value, torch.Size):
        return find(value)
    items = [mapped(item, find) for item in value]
    if all(map(is_, items, value)):
        return value
    base: Any = tuple if isinstance(value, tuple) else frozenset
    made = base.__new__(type(value), items)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def cells(function: FunctionType) -> list[CellType]:
    """The cells of a function to which something has been assigned."""
    return [cell for cell in function.__closure__ or () if is_filled(cell)]


def _methods(container: Any) -> Any:
    """The class whose methods a user's subclass cannot replace."""
    kinds = (OrderedDict, dict, list, set, deque)
    return next(kind for kind in kinds if isinstance(container, kind))


def _slots_of(value: Any) -> tuple[str, ...]:
    """The names of an object's slots."""
    kind: Any = type(value)
    return _slots(kind)


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    return tuple(_each_slot(kind))


def _each_slot(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ()) if base.__module__ != "builtins" else ()
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{base.__name__.lstrip('_')}{name}" if private else name
