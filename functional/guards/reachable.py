"""Everything reachable from a function: its structure, and the slots that hold it."""

from __future__ import annotations

import array
import enum
import functools
import inspect
import io
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.wrapper import ModuleCopy, Wrapper
from torchard.functional.guards.indirect import (
    INDIRECT,
    imported,
    is_proxy,
    library_names,
    setting_names,
    special,
)
from torchard.functional.guards.kinds import is_of_library, is_opaque, is_read, slots_of
from torchard.functional.guards.present_cells import is_filled
from torchard.functional.guards.referenced_names import (
    Code,
    code_of,
    constructors_of,
    functions_of_class,
    is_library_class,
    is_standard_container,
    is_users_class,
)
from torchard.functional.guards.slots import Slots, contents, entries_of, is_value, kind_of
from torchard.functional.guards.written_names import WRITTEN_TYPES

__all__ = ["SETTINGS", "Walk", "reachable"]

# Types that are compared by value.
SETTINGS = (
    *(bool, int, float, complex, str, bytes, range, slice, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.number),
)

# How many objects are guarded at most: what reaches more is traced at every call.
_OBJECTS = 100_000
_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_builtins_of: Callable[[Any], dict[str, Any]] = attrgetter("__builtins__")


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

    Attributes:
        met: the names that were found, which another pass must go by.
        reads: the object that was read (its number), what of it, and the token of what was there.
        unguardable: the numbers of objects that cannot be compared.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.met = code
        self.slots = Slots()
        self.structure: list[Any] = []
        self.kept: list[Any] = []
        self.reads: list[tuple[int, str, Any]] = []
        self.unguardable: list[int] = []
        self._numbers: dict[int, int] = {}
        self._parts: set[int] = set()
        self._words: set[str] = set()

    def run(self, roots: Sequence[Any]) -> None:
        """Visit everything reachable from the roots."""
        self.structure.append(tuple(map(self.token, roots)))
        for value in self.kept:  # grows during the loop
            if len(self.structure) > _OBJECTS:
                self.unguardable.append(len(self.structure) - 1)
                break
            self.structure.append(self._visit(value))
        self._methods_of_tensors()
        if self.code.indirect:
            self.meet(frozenset(self._words))
        self.slots.finish()

    def _methods_of_tensors(self) -> None:
        """Methods that the code may call, and users replace."""
        held, names = vars(torch.Tensor), self.code.names & _METHODS
        known = sorted(names & held.keys())
        self.slots.name(held, known, names.difference(known))
        self.structure.append(tuple((key, id(held[key])) for key in known))

    def token(self, value: Any, label: str = "") -> Any:
        """A value's token in the structure: a setting itself, or the number of an object."""
        token: Any
        if isinstance(value, SETTINGS) and not isinstance(value, enum.Enum):
            token = type(value), value
            if type(value) is str and value.isidentifier():
                self._words.add(value)
        else:
            token = self._numbers.get(id(value))
            if token is None:
                token = self._numbers[id(value)] = len(self.kept)
                self.kept.append(value)
        self.reads.append((len(self.structure) - 1, label, token))
        if isinstance(value, type) and label != " type" and is_users_class(value):
            made = tuple(self.token(fn, f".{key}") for key, fn in constructors_of(value))
            return token, made
        return token

    def meet(self, names: frozenset[str]) -> None:
        """Add names that are read as if they were in the code."""
        self.met |= Code(names)

    def _visit(self, value: Any) -> Any:
        if is_proxy(value):
            return "proxy", self.token(value.__repr__.__self__)
        if is_value(value):
            return kind_of(value)
        if isinstance(value, Wrapper):
            return self._transformed(value)
        found = special(self, value)
        if found is not None:
            return found
        for kinds, visit in _VISITS:
            if isinstance(value, kinds):
                return visit(self, value)
        return self._object(value)

    # -- functions ----------------------------------------------------------------------------

    def _function(self, fn: types.FunctionType) -> Any:
        mine = is_read(fn)
        if not mine and is_of_library(fn):
            return "opaque", id(fn)
        self.slots.picks.append((_of_function, fn))
        if fn.__kwdefaults__:
            self.slots.whole(fn.__kwdefaults__)
        code = code_of(fn.__code__)
        cells = tuple(
            self._cell(cell, key, code)
            for key, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        )
        defaults = self._tokens(fn.__defaults__ or (), "default ")
        defaults += self._tokens(fn.__kwdefaults__ or (), "keyword ")
        defaults += self._tokens((fn.__kwdefaults__ or {}).values(), "default ")
        if not mine:
            wrapped = self.token(getattr(fn, "__wrapped__", None))
            return "function", fn.__code__, cells, defaults, wrapped
        self.met |= code
        read = self._globals(fn, code), imported(self, fn.__globals__, code.imports)
        own = self._attributes(fn) if vars(fn) else ()
        return "function", fn.__code__, cells, defaults, read, own

    def _cell(self, cell: types.CellType, key: str, code: Code) -> Any:
        if not is_filled(cell):
            return "empty"
        value = cell.cell_contents
        if key in code.written and type(value) in WRITTEN_TYPES:
            return self._written(lambda: cell.cell_contents)
        self.slots.cells.append(cell)
        return self.token(value, f"the closure variable {key}")

    def _written(self, read: Callable[[], Any]) -> Any:
        """A value that is written and never read: only its type matters."""
        self.slots.facts.append((lambda: type(read()) in WRITTEN_TYPES, True))
        return "written"

    def _globals(self, fn: types.FunctionType, code: Code) -> Any:
        """The global values that a function names; of a dict that it only indexes, the items."""
        names, wanted = fn.__globals__, code.globals
        if self.code.finds_globals:
            wanted = wanted | self.code.names
        known, built_in = [], [key for key in sorted(wanted) if key not in names]
        tokens = []
        for key in sorted(key for key in wanted if key in names):
            value, items = names[key], code.items.get(key)
            if key in code.written and type(value) in WRITTEN_TYPES:
                tokens.append((key, self._written(functools.partial(names.get, key))))
                continue
            known.append(key)
            if type(value) is dict and items is not None and id(value) not in self._numbers:
                tokens.append((key, self._entries(value, items, f"the global {key}")))
            else:
                tokens.append((key, self.token(value, f"the global {key}")))
        self.slots.name(names, known, built_in)
        return tuple(tokens), self._builtins(_builtins_of(fn), built_in)

    def _builtins(self, held: dict[str, Any], names: Sequence[str]) -> Any:
        known = [key for key in names if key in held]
        self.slots.name(held, known)
        return tuple(self.token(held[key], f"the builtin {key}") for key in known)

    def _entries(self, mapping: Mapping[Any, Any], keys: Any, path: str) -> Any:
        present = sorted((key for key in keys if key in mapping), key=repr)
        missing = frozenset(keys) - frozenset(present)
        self.slots.pick(mapping, present, itemgetter)
        if missing:
            self.slots.absent.append((mapping.keys(), missing))
        return tuple((key, self.token(mapping[key], f"{path}[{key!r}]")) for key in present)

    def _transformed(self, value: Wrapper) -> Any:
        return "transformed", type(value), tuple(map(self.token, value.reads)), value.rewrites

    def _method(self, method: types.MethodType) -> Any:
        return "method", self.token(method.__func__), self.token(method.__self__, "self")

    def _partial(self, partial: functools.partial[Any]) -> Any:
        keywords = partial.keywords
        self.slots.whole(keywords)
        tokens = self._tokens((partial.func, *partial.args, *keywords.values()), "partial ")
        return "partial", tokens, tuple(keywords)

    # -- containers ---------------------------------------------------------------------------

    def _tokens(self, values: Any, label: str = "") -> tuple[Any, ...]:
        return tuple(self.token(value, f"{label}[{i}]") for i, value in enumerate(values))

    def _dict(self, mapping: dict[Any, Any]) -> Any:
        self.slots.whole(mapping)
        items = tuple(
            (self.token(key, "key "), self.token(value, f"[{key!r}]"))
            for key, value in entries_of(mapping)
        )
        if isinstance(mapping, defaultdict):
            items += (self.token(mapping.default_factory, ".default_factory"),)
        return "dict", type(mapping), items, self._of_subclass(mapping)

    def _sequence(self, values: Any) -> Any:
        if not isinstance(values, tuple):
            self.slots.sequence(values)
        return "sequence", type(values), self._tokens(values), self._of_subclass(values)

    def _of_subclass(self, values: Any) -> Any:
        if type(values).__module__ in ("builtins", "collections"):
            return ()
        return self.token(type(values), " type"), self._attributes(values)

    def _set(self, values: Any) -> Any:
        copy = frozenset(values)
        if not isinstance(values, frozenset):
            self.slots.sets.append((values, copy))
        items = [value for value in values if not isinstance(value, SETTINGS)]
        return "set", type(values), copy, self._tokens(items)

    def _array(self, values: Any) -> Any:
        if isinstance(values, np.ndarray) and values.dtype.hasobject:
            self.unguardable.append(len(self.structure) - 1)
            return "array", id(values)
        held = contents(values)
        self.slots.arrays.append((values, held))
        kind = (values.shape, str(values.dtype)) if isinstance(values, np.ndarray) else ()
        return "array", type(values), kind, held

    # -- objects ------------------------------------------------------------------------------

    def _module(self, module: types.ModuleType) -> Any:
        if source.is_installed_module(module):
            return "module", id(module), library_names(self, module)
        held = vars(module)
        known = sorted(key for key in self.code.names | {"__getattr__"} if key in held)
        self.slots.name(held, known, self.code.names.difference(known))
        tokens = tuple((key, self.token(held[key], f".{key}")) for key in known)
        return "module", id(module), tokens, self.token(type(module), " type")

    def _iterator(self, value: Any) -> Any:
        if not isinstance(value, io.IOBase):
            self.unguardable.append(len(self.structure) - 1)
        return "iterator", id(value)

    def _copy(self, holder: ModuleCopy) -> Any:
        """A private copy of a module: its code, and the named attributes of its parts."""
        parts = [*holder.module.modules()]
        self._parts.update(map(id, parts))
        tables = [table for part in parts for table in internals.tensor_tables(part).values()]
        held = holder.tensors_in(tables)
        self.slots.facts.append((functools.partial(holder.tensors_in, tables), held))
        return "copy", self.token(holder.module, ""), self._attributes(holder), tuple(held)

    def _part(self, part: torch.nn.Module) -> Any:
        """A part of a private copy. `_copy` guards which tensors it has, and no call their values."""
        held = vars(part)
        self.slots.typed.append(part)
        wanted = [key for key in held if key not in _TABLES and self._names(part, held, key)]
        self.slots.sized.append(held)
        self.slots.pick(held, [*wanted, *held.keys() & {"forward"}], itemgetter)
        self.slots.whole(internals.child_table(part))
        for key in internals.HOOK_TABLES:
            self.slots.whole(held[key])
        own = self._tokens(part.children())
        forward = held.get("forward")
        forward = getattr(forward, "__wrapped__", forward)
        if getattr(forward, "__func__", None) is not type(part).forward:
            own += (self.token(forward, ".forward"),)
        named = tuple((key, self.token(held[key], f".{key}")) for key in sorted(wanted))
        hooks = self._tokens(held[key] for key in internals.HOOK_TABLES if held[key])
        return "part", self.token(type(part), " type"), own, named, hooks

    def _object(self, value: Any) -> Any:
        """The named attributes of an instance and of its class."""
        if type(value).__module__.startswith("torch.backends"):
            return "settings", id(value), setting_names(self, value, lambda key: True)
        if is_opaque(type(value)) or not (hasattr(value, "__dict__") or slots_of(type(value))):
            return "opaque", id(value)
        if id(value) in self._parts:
            return self._part(value)
        self.slots.typed.append(value)
        member = id(value) if isinstance(value, enum.Enum) else None
        return "object", member, self.token(type(value), " type"), self._attributes(value)

    def _attributes(self, value: Any) -> Any:
        held = getattr(value, "__dict__", None)
        slots = slots_of(type(value))
        tokens: list[Any] = []
        if isinstance(held, dict):
            wanted = [key for key in held if self._names(value, held, key)]
            self.slots.keyed.append(held)
            self.slots.pick(held, wanted, itemgetter)
            tokens += [(key, self.token(held[key], f".{key}")) for key in sorted(wanted, key=str)]
        present = [key for key in slots if hasattr(value, key)]
        self.slots.pick(value, present, attrgetter)
        tokens += [(key, self.token(getattr(value, key), f".{key}")) for key in present]
        return tuple(tokens)

    def _names(self, value: Any, held: dict[Any, Any], key: Any) -> bool:
        """Whether the code may read an attribute."""
        if isinstance(value, torch.nn.Module):
            if key in internals.NOT_READ_BY_MODULES:
                return False
            if key in internals.READ_BY_MODULES:
                return True
        if self.code.reflects or key in self.code.names:
            return True
        if key in self.code.written and type(held[key]) not in WRITTEN_TYPES:
            return True
        kind: Any = type(value)
        return is_library_class(kind) or is_standard_container(kind)

    def _class(self, cls: type) -> Any:
        """The named data and functions of a custom class, and of its metaclass."""
        tokens: list[Any] = []
        for base in cls.__mro__:
            if is_users_class(base):
                named = functions_of_class(base, self.code)
                held = vars(base)
                self.slots.keyed.append(held)
                self.slots.pick(held, [key for key, _ in named], itemgetter)
                tokens += [(key, self.token(item, f".{key}")) for key, item in named]
                matched = held.get("__match_args__")
                if "__match_args__" in self.code.names and isinstance(matched, tuple):
                    self.meet(frozenset(matched))
        if "__subclasses__" in self.code.names:
            self.slots.facts.append((cls.__subclasses__, cls.__subclasses__()))
            tokens += self._tokens(cls.__subclasses__())
        if is_users_class(type(cls)):
            tokens.append(self.token(type(cls), " type"))
        if issubclass(cls, torch.nn.Module):
            tokens += self._tokens(internals.GLOBAL_HOOK_TABLES)
            tokens.append(self._library_forward(cls))
        return "class", id(cls), tuple(tokens)

    def _library_forward(self, cls: type[torch.nn.Module]) -> Any:
        """The functions that the forward of a library's module calls and that users replace."""
        owner = next(base for base in cls.__mro__ if "forward" in vars(base))
        self.slots.name(vars(owner), ["forward"])
        forward = inspect.unwrap(cls.forward)
        if not isinstance(forward, types.FunctionType) or is_read(forward):
            return self.token(forward, ".forward")
        code = code_of(forward.__code__)
        self.met |= code
        return forward.__code__, self._globals(forward, code)


_METHODS = frozenset(dir(torch.Tensor))
# A module's tables, and its forward: private copies wrap these.
_TABLES = (internals.READ_BY_MODULES - {"training"}) | {"forward"}

_VISITS: tuple[tuple[Any, Callable[[Walk, Any], Any]], ...] = (
    (types.FunctionType, Walk._function),
    (types.MethodType, Walk._method),
    (functools.partial, Walk._partial),
    *INDIRECT,
    (ModuleCopy, Walk._copy),
    (dict, Walk._dict),
    ((list, tuple, deque), Walk._sequence),
    ((set, frozenset), Walk._set),
    ((np.ndarray, bytearray, memoryview, array.array), Walk._array),
    (types.ModuleType, Walk._module),
    (type, Walk._class),
    (Iterator, Walk._iterator),
)
