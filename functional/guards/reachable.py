"""Everything reachable from a function: its structure, and the slots that hold it."""

from __future__ import annotations

import array
import enum
import functools
import hashlib
import io
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.placed import is_placed
from torchard.functional.core.tensor_spec import TensorSpec
from torchard.functional.core.wrapper import Wrapper
from torchard.functional.guards.referenced_names import (
    Code,
    code_of,
    functions_of_class,
    is_library_class,
    is_users_class,
)

__all__ = ["SETTINGS", "Slots", "Walk", "contents", "is_value", "kind_of", "reachable"]

# Types that are compared by value.
SETTINGS = (
    *(bool, int, float, complex, str, bytes, range, slice, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.number),
)

# How many objects are guarded at most: what reaches more is traced at every call.
_OBJECTS = 100_000
# Arrays up to this size are compared with a copy, larger ones with a digest.
_ARRAY_BYTES = 1 << 16

_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def is_value(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_placed(value)


def contents(values: Any) -> bytes:
    """The bytes of an array or a buffer; of a large one, their digest."""
    held: bytes = values.tobytes() if isinstance(values, np.ndarray) else bytes(values)
    return held if len(held) <= _ARRAY_BYTES else hashlib.blake2b(held).digest()


def kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        return "tensor", type(value), TensorSpec.of(value) if strided else (value.shape, value.layout)
    return "placed", value.__torchard_placed__()[:4] if is_placed(value) else None


class Slots:
    """The slots that hold objects, by how they are read."""

    def __init__(self) -> None:
        self.empty: list[Any] = []
        self.cells: list[types.CellType] = []
        self.picks: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        self.keyed: list[Any] = []
        self.values: list[Any] = []
        self.sized: list[Any] = []
        self.sets: list[tuple[Any, Any]] = []
        self.arrays: list[tuple[Any, bytes]] = []

    def pick(self, owner: Any, names: Sequence[str], by: Callable[..., Any]) -> None:
        """Add some entries or attributes of an object."""
        if names:
            # A getter of one name would not return a tuple.
            self.picks.append((by(*names, names[0]), owner))

    def whole(self, mapping: dict[Any, Any]) -> None:
        """Add all entries of a dict."""
        if mapping:
            self.keyed.append(mapping)
            self.values.append(dict.values(mapping))
        else:
            self.empty.append(mapping)

    def sequence(self, values: Any) -> None:
        """Add all items of a list."""
        if values:
            self.sized.append(values)
            self.values.append(values)
        else:
            self.empty.append(values)


def reachable(roots: Sequence[Any]) -> Walk:
    """A walk with all names in the code that it reaches."""
    code = Code()
    while True:
        walk = Walk(code)
        walk.run(roots)
        if walk.met == code:
            return walk
        code = walk.met


class Walk:
    """One pass over everything reachable, breadth first, each object once.

    Args:
        code: names in the functions that are reached; attributes of the user's objects that are not
            among them are skipped.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.met = code
        self.slots = Slots()
        self.structure: list[Any] = []
        self.kept: list[Any] = []
        self.guardable = True
        self._numbers: dict[int, int] = {}

    def run(self, roots: Sequence[Any]) -> None:
        """Visit everything reachable from the roots."""
        self.structure.append(tuple(map(self.token, roots)))
        for value in self.kept:  # grows during the loop
            if len(self.structure) > _OBJECTS:
                self.guardable = False
                break
            self.structure.append(self._visit(value))

    def token(self, value: Any) -> Any:
        """A value's token in the structure: a setting itself, or the number of an object."""
        if isinstance(value, SETTINGS) and not isinstance(value, enum.Enum):
            return type(value), value
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return number

    def _visit(self, value: Any) -> Any:
        if is_value(value):
            return kind_of(value)
        if isinstance(value, Wrapper):
            return self._transformed(value)
        for kinds, visit in _VISITS:
            if isinstance(value, kinds):
                return visit(self, value)
        return self._object(value)

    # -- functions ----------------------------------------------------------------------------

    def _function(self, fn: types.FunctionType) -> Any:
        mine = source.is_user(fn.__code__) and not source.is_installed(fn.__code__)
        self.slots.picks.append((_of_function, fn))
        if fn.__kwdefaults__:
            self.slots.whole(fn.__kwdefaults__)
        cells = tuple(map(self._cell, fn.__closure__ or ()))
        defaults = self._tokens(fn.__defaults__ or ())
        defaults += self._tokens(fn.__kwdefaults__ or ())
        defaults += self._tokens((fn.__kwdefaults__ or {}).values())
        wrapped = getattr(fn, "__wrapped__", None)
        code = code_of(fn.__code__)
        if not mine:
            return "function", fn.__code__, cells, defaults, self.token(wrapped)
        self.met |= code
        return "function", fn.__code__, cells, defaults, self._globals(fn.__globals__, code)

    def _cell(self, cell: types.CellType) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return "empty"
        self.slots.cells.append(cell)
        return self.token(value)

    def _globals(self, names: dict[str, Any], code: Code) -> Any:
        """The global values that a function names; of a dict that it only indexes, the items."""
        known = [key for key in sorted(code.globals) if key in names]
        self.slots.pick(names, known, itemgetter)
        tokens = []
        for key in known:
            value, items = names[key], code.items.get(key)
            if type(value) is dict and items is not None and id(value) not in self._numbers:
                tokens.append((key, self._entries(value, items)))
            else:
                tokens.append((key, self.token(value)))
        return tuple(tokens)

    def _entries(self, mapping: Mapping[Any, Any], keys: Any) -> Any:
        present = sorted((key for key in keys if key in mapping), key=repr)
        self.slots.pick(mapping, present, itemgetter)
        return tuple((key, self.token(mapping[key])) for key in present)

    def _transformed(self, value: Wrapper) -> Any:
        return "transformed", type(value), self.token(value.fn), value.rewrites

    def _method(self, method: types.MethodType) -> Any:
        return "method", self.token(method.__func__), self.token(method.__self__)

    def _partial(self, partial: functools.partial[Any]) -> Any:
        keywords = partial.keywords
        self.slots.whole(keywords)
        tokens = self._tokens((partial.func, *partial.args, *keywords.values()))
        return "partial", tokens, tuple(keywords)

    # -- containers ---------------------------------------------------------------------------

    def _tokens(self, values: Any) -> tuple[Any, ...]:
        return tuple(map(self.token, values))

    def _dict(self, mapping: dict[Any, Any]) -> Any:
        self.slots.whole(mapping)
        items = tuple((self.token(key), self.token(value)) for key, value in dict.items(mapping))
        return "dict", type(mapping), items, self._attributes(mapping)

    def _sequence(self, values: Any) -> Any:
        if not isinstance(values, tuple):
            self.slots.sequence(values)
        return "sequence", type(values), self._tokens(values), self._attributes(values)

    def _set(self, values: Any) -> Any:
        copy = frozenset(values)
        if not isinstance(values, frozenset):
            self.slots.sets.append((values, copy))
        return "set", type(values), copy

    def _array(self, values: Any) -> Any:
        if isinstance(values, np.ndarray) and values.dtype.hasobject:
            self.guardable = False
            return "array", id(values)
        held = contents(values)
        self.slots.arrays.append((values, held))
        kind = (values.shape, str(values.dtype)) if isinstance(values, np.ndarray) else ()
        return "array", type(values), kind, held

    # -- objects ------------------------------------------------------------------------------

    def _module(self, module: types.ModuleType) -> Any:
        if source.is_installed_module(module):
            return "opaque", id(module)
        held = vars(module)
        known = sorted(key for key in self.code.names if key in held)
        self.slots.pick(held, known, itemgetter)
        return "module", id(module), tuple((key, self.token(held[key])) for key in known)

    def _iterator(self, value: Any) -> Any:
        self.guardable = self.guardable and isinstance(value, io.IOBase)
        return "iterator", id(value)

    def _object(self, value: Any) -> Any:
        """The named attributes of an instance and of its class."""
        if _is_opaque(type(value)) or not (hasattr(value, "__dict__") or _slots_of(type(value))):
            return "opaque", id(value)
        return "object", self.token(type(value)), self._attributes(value)

    def _attributes(self, value: Any) -> Any:
        if type(value).__module__ in ("builtins", "collections"):
            return ()
        held = getattr(value, "__dict__", None)
        slots = _slots_of(type(value))
        tokens: list[Any] = []
        if isinstance(held, dict):
            wanted = [key for key in held if self._names(value, key)]
            self.slots.keyed.append(held)
            self.slots.pick(held, wanted, itemgetter)
            tokens += [(key, self.token(held[key])) for key in sorted(wanted, key=str)]
        present = [key for key in slots if hasattr(value, key)]
        self.slots.pick(value, present, attrgetter)
        tokens += [(key, self.token(getattr(value, key))) for key in present]
        return tuple(tokens)

    def _names(self, value: Any, key: Any) -> bool:
        if isinstance(value, torch.nn.Module):
            if key in internals.NOT_READ_BY_MODULES:
                return False
            if key in internals.READ_BY_MODULES:
                return True
        if self.code.reflects or key in self.code.names:
            return True
        cls: Any = type(value)
        return is_library_class(cls)

    def _class(self, cls: type) -> Any:
        """The named data and functions of a class of the user's."""
        tokens: list[Any] = []
        for base in cls.__mro__:
            if is_users_class(base):
                named = functions_of_class(base, self.code)
                held = vars(base)
                self.slots.keyed.append(held)
                self.slots.pick(held, [key for key, _ in named], itemgetter)
                tokens += [(key, self.token(item)) for key, item in named]
        return "class", id(cls), tuple(tokens)


_VISITS: tuple[tuple[Any, Callable[[Walk, Any], Any]], ...] = (
    (types.FunctionType, Walk._function),
    (types.MethodType, Walk._method),
    (functools.partial, Walk._partial),
    (dict, Walk._dict),
    ((list, tuple, deque), Walk._sequence),
    ((set, frozenset), Walk._set),
    ((np.ndarray, bytearray, memoryview, array.array), Walk._array),
    (types.ModuleType, Walk._module),
    (type, Walk._class),
    (Iterator, Walk._iterator),
)


def _is_opaque(cls: type) -> bool:
    """Whether instances are compared by identity: torch's, this library's, enums and files."""
    if issubclass(cls, torch.nn.Module):
        return False
    return cls.__module__.partition(".")[0] in ("torch", "torchard") or issubclass(
        cls, (enum.Enum, io.IOBase)
    )


def _slots_of(cls: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in cls.__mro__:
        if is_users_class(base):
            slots = base.__dict__.get("__slots__", ())
            names += (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))
