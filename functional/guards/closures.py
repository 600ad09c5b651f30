"""Paths to the tensors that a function closes over, so that each call reads them again."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchard.functional.core import user_lines as source
from torchard.functional.core.placed import is_placed
from torchard.functional.core.wrapper import Wrapper
from torchard.functional.guards.present_cells import is_filled
from torchard.functional.guards.reachable import SETTINGS

__all__ = ["Reader", "reader_of"]

# Bounds of the search: a path is followed at every call, and searched once per trace.
_DEPTH, _OBJECTS = 8, 20_000

AccessStep = tuple[str, Callable[[Any], Any]]


class Reader:
    """A path from a function to a tensor it uses: accessors, with a description of each."""

    def __init__(self, steps: tuple[AccessStep, ...]) -> None:
        self.steps = steps

    def __str__(self) -> str:
        """The path as Python, for messages and plans: ``p['w1']``."""
        texts = [text for text, _ in self.steps if text]
        return "".join(
            text if i == 0 or text.startswith(("[", ".")) else f".{text}"
            for i, text in enumerate(texts)
        )

    def __call__(self, fn: Any) -> Any:
        value = fn
        for _, step in self.steps:
            value = step(value)
        return value


def _cell(i: int) -> Callable[[Any], Any]:
    return lambda fn: fn.__closure__[i].cell_contents


def _global(key: str) -> Callable[[Any], Any]:
    return lambda fn: fn.__globals__[key]


def _default(i: int) -> Callable[[Any], Any]:
    return lambda fn: fn.__defaults__[i]


def _keyword(key: str) -> Callable[[Any], Any]:
    return lambda fn: fn.__kwdefaults__[key]


def _item(key: Any) -> Callable[[Any], Any]:
    return lambda value: value[key]


def _attribute(key: str) -> Callable[[Any], Any]:
    return lambda value: getattr(value, key)


def _of_function(fn: types.FunctionType) -> Iterator[tuple[AccessStep, Any]]:
    for i, (key, cell) in enumerate(
        zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    ):
        if is_filled(cell):
            yield (key, _cell(i)), cell.cell_contents
    names = _global_names(fn.__code__)
    for key in names:
        if key in fn.__globals__:
            child = fn.__globals__[key]
            yield (key, _global(key)), child
            if isinstance(child, types.ModuleType):
                yield from _of_module(child, key, names)
    for i, value in enumerate(fn.__defaults__ or ()):
        yield (f"default {i}", _default(i)), value
    for key, value in (fn.__kwdefaults__ or {}).items():
        yield (f"default {key}", _keyword(key)), value


def _of_module(module: types.ModuleType, key: str, names: set[str]) -> Iterator[tuple[AccessStep, Any]]:
    """The tensors in a module that the function's code may name."""
    for name in names & vars(module).keys():
        item = vars(module)[name]
        if isinstance(item, torch.Tensor) or is_placed(item):
            yield (f"{key}.{name}", _through(key, name)), item


def _read(i: int) -> Callable[[Any], Any]:
    return lambda wrapper: wrapper.reads[i]


def _through(key: str, name: str) -> Callable[[Any], Any]:
    return lambda fn: vars(fn.__globals__[key])[name]


def _global_names(code: types.CodeType) -> set[str]:
    """Global names in a function's code, functions defined inside it included."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _children(value: Any) -> Iterator[tuple[AccessStep, Any]]:
    if isinstance(value, types.FunctionType):
        if source.is_user(value.__code__):
            yield from _of_function(value)
        elif hasattr(value, "__wrapped__"):  # torch.func.grad(f) and the like
            yield ("", lambda f: f.__wrapped__), value.__wrapped__
    elif isinstance(value, Wrapper):
        for i, fn in enumerate(value.reads):
            yield ("", _read(i)), fn
    elif isinstance(value, types.MethodType):
        yield ("", lambda m: m.__func__), value.__func__
        yield ("self", lambda m: m.__self__), value.__self__
    elif isinstance(value, functools.partial):
        yield ("", lambda p: p.func), value.func
        yield ("partial", lambda p: p.args), value.args
        yield ("partial", lambda p: p.keywords), value.keywords
    elif isinstance(value, dict):
        for key, item in value.items():
            yield (f"[{key!r}]", _item(key)), item
    elif isinstance(value, (list, tuple, deque)):
        for i, item in enumerate(value):
            yield (f"[{i}]", _item(i)), item
    elif isinstance(value, type):
        yield from _of_class(value)
    elif not isinstance(value, types.ModuleType):
        yield from _of_object(value)


def _of_object(value: Any) -> Iterator[tuple[AccessStep, Any]]:
    """The attributes of an instance: in its dict, in slots, or of its class."""
    held = getattr(value, "__dict__", {})
    for key, item in list(held.items()):
        yield (f".{key}", _attribute(key)), item
    for cls in type(value).__mro__:
        for key in _slots(cls):
            if hasattr(value, key):
                yield (f".{key}", _attribute(key)), getattr(value, key)
    for step, item in _of_class(type(value)):
        if step[0][1:] not in held:
            yield step, item


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ()) if _is_users(cls) else ()
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _of_class(cls: type) -> Iterator[tuple[AccessStep, Any]]:
    """The data attributes of a custom class and its bases, without methods and descriptors."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not _is_users(base):
            continue
        for key, item in list(vars(base).items()):
            if key in seen or key.startswith("__") or hasattr(type(item), "__get__"):
                continue
            seen.add(key)
            yield (f".{key}", _attribute(key)), item


_OTHERS = ("builtins", "torch", "torchard", "typing", "collections", "abc", "enum", "numpy")


def _is_users(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in _OTHERS


def _walk(fn: Any) -> Iterator[tuple[tuple[AccessStep, ...], Any]]:
    """Everything reachable from a function, breadth first, each object once."""
    queue: list[tuple[tuple[AccessStep, ...], Any]] = [((), fn)]
    seen = {id(fn)}
    for steps, value in queue:
        yield steps, value
        if isinstance(value, torch.Tensor) or is_placed(value) or len(steps) >= _DEPTH:
            continue
        for step, child in _children(value):
            if isinstance(child, SETTINGS):
                continue
            if id(child) not in seen and len(seen) < _OBJECTS:
                seen.add(id(child))
                queue.append(((*steps, step), child))


def reader_of(fn: Any, value: Any) -> Reader | None:
    """The path from fn to this object; None if there is none in its environment."""
    for steps, reached in _walk(fn):
        if reached is value:
            return Reader(steps)
    return None
