"""The objects to which any object refers, by name: attributes, slots, items, closures, iterators."""

from __future__ import annotations

import gc
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch

from torchard.functional.core.placed import is_placed
from torchard.functional.core.wrapper import ModuleCopy, Wrapper

__all__ = ["References", "referred"]

# Types whose objects refer to nothing of a call. The type suffices to decide; most leaves are
# numbers.
_ATOMS = (
    *(str, bytes, bool, int, float, complex, type(None), type(...), range, slice),
    *(type, ModuleType, CodeType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator),
    *(torch.fx.Graph, torch.fx.Node, ModuleCopy),
)
_CONTAINERS = (list, dict, set, tuple, bytearray, deque, defaultdict, OrderedDict)
# The objects that are searched from one root: a configuration has hundreds, a large module thousands.
_MOST = 20_000


@dataclass
class References:
    """The objects to which some roots refer, and the wanted tensors among these objects.

    Args:
        is_wanted: returns whether a tensor is wanted.

    Attributes:
        tensors: the wanted tensors, each once, by the path at which it was found first.
        objects: all objects that were searched, by id.
        complete: whether all objects were searched; there is a limit.
    """

    is_wanted: Callable[[torch.Tensor], bool]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)
    complete: bool = True
    _parents: dict[int, list[int]] = field(default_factory=dict)

    def search(self, root: Any, path: str) -> dict[str, torch.Tensor]:
        """The wanted tensors that this root adds, by path."""
        before = len(self.tensors)
        left: deque[tuple[Any, str, int]] = deque([(root, path, 0)])
        most = len(self.objects) + _MOST
        while left and len(self.objects) < most:
            value, path, parent = left.popleft()
            if isinstance(value, _ATOMS) or is_placed(value):
                continue
            self._parents.setdefault(id(value), []).append(parent)
            if id(value) in self.objects:
                continue
            self.objects[id(value)] = value
            if not isinstance(value, torch.Tensor):
                left += ((child, path + name, id(value)) for name, child in referred(value))
            elif self.is_wanted(value):
                self.tensors[self._unused(path)] = value
        self.complete &= not left
        return dict([*self.tensors.items()][before:])

    def _unused(self, path: str) -> str:
        """The path of a tensor: items of a deque, and keys of any class, have none."""
        paths = (path if i == 0 else f"{path}({i})" for i in itertools.count())
        return next(path for path in paths if path not in self.tensors)

    def holders(self) -> set[int]:
        """The ids of the objects through which the wanted tensors are referred to."""
        found: set[int] = set()
        left = [id(tensor) for tensor in self.tensors.values()]
        while left:
            for parent in self._parents.get(left.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    left.append(parent)
        return found

    def containers(self, holders: set[int]) -> set[int]:
        """The ids of Python's own containers in these objects, and of those in them."""
        found: set[int] = set()
        for i, value in self.objects.items():  # holders come first
            if type(value) in _CONTAINERS and not (holders | found).isdisjoint(self._parents[i]):
                found.add(i)
        return found


def referred(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, with what follows its own path in theirs."""
    if isinstance(value, FunctionType):
        yield from _closed_over(value)
    elif isinstance(value, GeneratorType):
        if value.gi_frame is not None:
            yield from ((f" (its {name})", item) for name, item in value.gi_frame.f_locals.items())
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, Wrapper):  # and not its cache, which has tensors of other traces
        yield from ((f".{getattr(fn, '__name__', 'fn')}", fn) for fn in value.reads)
    else:
        yield from _items(value)
        yield from ((f".{name}", item) for name, item in _attributes(value))


def _closed_over(function: FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        for item in gc.get_referents(cell):  # none if nothing has been assigned
            yield f" (its {name})", item
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield " (a default of it)", default
    yield from ((f".{name}", item) for name, item in vars(function).items())


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container, and of an iterator or view what it is of."""
    if isinstance(value, dict):
        for key, item in dict.items(value):
            yield "", key
            yield f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", item
    elif isinstance(value, (list, tuple)):
        kind: Any = list if isinstance(value, list) else tuple
        yield from ((f"[{i}]", item) for i, item in enumerate(kind.__iter__(value)))
    elif type(value).__module__ in ("builtins", "collections", "itertools", "functools"):
        yield from (("", item) for item in gc.get_referents(value))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(value, "__dict__"):
        yield from vars(value).items()
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if type(slot) is _SLOT:
                try:
                    yield name, slot.__get__(value)
                except AttributeError:  # nothing has been assigned to it
                    continue


class _Slotted:
    __slots__ = ("one",)


_SLOT: Any = type(vars(_Slotted)["one"])
