"""The objects to which a function's code refers, and which of them a call changes."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from torchard.functional.core import user_lines as source
from torchard.functional.guards.referenced_names import is_users_class
from torchard.functional.guards.references import referred
from torchard.testing.rounding.roundings import alike

__all__ = ["Surroundings", "modules_behind"]

# Objects that are searched from one function: a model has thousands.
_MOST = 50_000
_VALUES = (str, bytes, bytearray, bool, int, float, complex, type(None))
_ABSENT = object()


class Surroundings:
    """Everything that a function's code refers to, as it is now.

    Variables that it closes over, globals that its code names, attributes of its object, defaults, and
    all that these hold; functions of the user's among them are searched too. The internal state of C
    libraries is not seen.

    Args:
        fn: the function.

    >>> from torchard.testing.surroundings import Surroundings
    >>> log = []
    >>> def remembers(x):
    ...     log.append(x)
    >>> before = Surroundings(remembers)
    >>> remembers(1)
    >>> before.change()
    'log (a list of 1 item, before of none)'
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._kept: dict[int, Any] = {}  # alive, so that ids stay theirs
        self.tokens = self._walk()
        self.values = {
            path: value.detach().clone() for path, value in self._tensors(self.tokens).items()
        }

    def change(self) -> str | None:
        """The change; None if nothing has changed."""
        now = Surroundings(self.fn)
        for path, old in self.tokens.items():
            if (new := now.tokens.get(path, _ABSENT)) != old:
                return _said(path, self._kept, old, now._kept, new)
        if new_path := next((path for path in now.tokens if path not in self.tokens), None):
            return f"{new_path} (it was not there)"
        for path, value in self.values.items():
            if not bool(alike(now.values[path], value).all()):
                return f"{path} (values of {_text(value)})"
        return None

    def _tensors(self, tokens: dict[str, Any]) -> dict[str, torch.Tensor]:
        kept = {path: self._kept.get(token[1]) for path, token in tokens.items() if token[0] == "id"}
        return {path: x for path, x in kept.items() if isinstance(x, torch.Tensor)}

    def _walk(self) -> dict[str, Any]:
        tokens: dict[str, Any] = {}
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        left: deque[tuple[str, Any]] = deque([(name, self.fn)])
        while left and len(self._kept) < _MOST:
            path, value = left.popleft()
            while path in tokens:
                path += "'"  # keys of a dict and classes have no path of their own
            known = id(value) in self._kept
            tokens[path] = self._token(value)
            if isinstance(value, torch.Tensor):
                if value.is_leaf and value.grad is not None:
                    left.append((f"{path}.grad", value.grad))
            elif not known and not isinstance(value, (*_VALUES, ModuleType)):
                left += ((_under(path, name, value), child) for name, child in _children(value))
        return tokens

    def _token(self, value: Any) -> tuple[Any, ...]:
        """A key that is equal for a value as long as the value does not change."""
        if isinstance(value, _VALUES):
            return "value", type(value), repr(value)
        self._kept[id(value)] = value
        if isinstance(value, torch.Generator):
            return "generator", value.get_state().numpy().tobytes()
        if isinstance(value, random.Random):
            return "generator", value.getstate()
        if isinstance(value, np.random.Generator):
            return "generator", repr(value.bit_generator.state)
        if isinstance(value, np.ndarray):
            return "array", value.shape, value.dtype, hash(value.tobytes())
        if isinstance(value, (list, dict, set, deque)):
            return "container", id(value), len(value)
        return "id", id(value)


# Objects that are searched for modules: those that a function calls are close to it.
_MOST_NEAR = 2_000


def modules_behind(*roots: Any) -> list[torch.nn.Module]:
    """The modules that functions are, close over, or name as globals; not those inside of others."""
    found: list[torch.nn.Module] = []
    kept: dict[int, Any] = {}
    left = deque(roots)
    while left and len(kept) < _MOST_NEAR:
        value = left.popleft()
        if id(value) in kept or isinstance(value, (*_VALUES, ModuleType, torch.Tensor)):
            continue
        kept[id(value)] = value
        if isinstance(value, torch.nn.Module):
            found.append(value)
        else:
            left += (child for _, child in _children(value))
    return found


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects to which an object refers; for classes and functions, only the user's."""
    if isinstance(value, type):
        if is_users_class(value):
            own = ((name, item) for name, item in vars(value).items() if name not in _OF_CLASSES)
            yield from ((f".{name}", item) for name, item in own)
    elif isinstance(value, MethodType):
        yield ".__func__", value.__func__
        yield ".__self__", value.__self__
    # Python creates the dicts of these objects when they are requested.
    elif isinstance(value, (staticmethod, classmethod)):
        yield ".__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, _MEMOS):
        yield "", value.__wrapped__
    elif isinstance(value, FunctionType):
        if source.is_user(value.__code__):
            names = sorted(_global_names(value.__code__) & value.__globals__.keys())
            yield from ((f"{_GLOBAL}{name}", value.__globals__[name]) for name in names)
            yield from referred(value)
    else:
        yield from referred(value)
        cls: Any = type(value)
        if is_users_class(cls):
            yield "", cls


_GLOBAL = "global "
# Class attributes that no call changes and Python creates anew, or that hold the class itself.
_OF_CLASSES = ("__dict__", "__weakref__", "__doc__", "__annotations__")
# Types that only store results of their function.
_MEMOS = (type(functools.lru_cache(len)),)


def _global_names(code: CodeType) -> set[str]:
    """The global names in code, and in the functions that are defined inside of it."""
    inner = (_global_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _under(path: str, name: str, value: Any) -> str:
    """The path of a referenced object: closure variables and globals by their own names."""
    if name.startswith(_GLOBAL):
        return name.removeprefix(_GLOBAL)
    if name.startswith(" (its "):
        return name.removeprefix(" (its ").removesuffix(")")
    return path + name


def _said(path: str, then: dict[int, Any], old: Any, now: dict[int, Any], new: Any) -> str:
    if new is _ABSENT:
        return f"{path} (it is not there any more)"
    if old[0] == new[0] == "value":
        return f"{path} (from {old[2]} to {new[2]})"
    if old[0] == new[0] == "generator":
        return f"{path} (the state of a random generator)"
    if old[0] == new[0] == "array":
        return f"{path} (values of an array)"
    if old[0] == new[0] == "container" and old[1] == new[1]:
        kind = type(now[new[1]]).__name__
        return f"{path} (a {kind} of {_count(new[2])}, before of {old[2] or 'none'})"
    return f"{path} (to {_text(now[new[1]]) if new[0] != 'value' else new[2]})"


def _count(n: int) -> str:
    return f"{n} item{'' if n == 1 else 's'}"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"another {type(value).__name__}"
