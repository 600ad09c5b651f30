"""The names in code: globals, attributes, items. They bound what a function can read."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchard.functional.core import user_lines as source
from torchard.functional.guards.written_names import written_names

__all__ = [
    "Code",
    "code_of",
    "constructors_of",
    "functions_of_class",
    "is_library_class",
    "is_standard_container",
    "is_users_class",
]

# Functions that may read attributes whose names are not in the code.
_REFLECTION = frozenset(
    (
        *("getattr", "vars", "__dict__", "attrgetter", "asdict", "astuple", "fields", "dir"),
        *("copy", "deepcopy"),
    )
)
# Ways to find globals by strings, and further ones to find modules and their attributes.
_NAMESPACES = frozenset(("globals", "eval", "exec", "__globals__"))
_INDIRECT = _NAMESPACES | {"modules", "import_module", "__import__", "getattr", "hasattr"}
# Functions that run special methods of any object.
_RUN_BY = {"__repr__": frozenset(("repr", "str", "format")), "__hash__": frozenset(("hash",))}


@dataclass(frozen=True)
class Code:
    """The names in one or several functions.

    Attributes:
        names: attributes, and strings that may be looked up.
        globals: global names.
        items: for a global name that is only used for items with constant keys, these keys.
        imports: the modules that are imported inside, each with its level.
        written: names of globals, closure variables and attributes that are written and not read.
    """

    names: frozenset[Any] = frozenset()
    globals: frozenset[str] = frozenset()
    items: dict[str, frozenset[Any]] = field(default_factory=dict, compare=False)
    imports: frozenset[tuple[str, int]] = frozenset()
    written: frozenset[str] = frozenset()

    def __or__(self, other: Code) -> Code:
        return Code(self.names | other.names, written=self.written | other.written)

    @property
    def indirect(self) -> bool:
        """Whether modules and their attributes may be read whose names are strings."""
        return not _INDIRECT.isdisjoint(self.names)

    @property
    def finds_globals(self) -> bool:
        """Whether globals may be read whose names are strings."""
        return not _NAMESPACES.isdisjoint(self.names)

    @property
    def reflects(self) -> bool:
        """Whether attributes may be read whose names are not in the code."""
        return not _REFLECTION.isdisjoint(self.names)


@functools.lru_cache(4096)
def code_of(code: types.CodeType) -> Code:
    """The names in a code object and in those nested in it, and in strings that it evaluates."""
    parts = [*_nested(code)]
    for text in _evaluated(parts):
        parts += _nested(text)
    globals_, items = _globals_and_items(parts)
    written = written_names(parts) - {c for part in parts for c in part.co_consts if isinstance(c, str)}
    names = {name for part in parts for name in _names_in(part)}
    imports = {found for part in parts for found in _imports(part)}
    return Code(
        names=frozenset(names - written),
        globals=frozenset(globals_),
        items=items,
        imports=frozenset(imports),
        written=written,
    )


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    if any(i.opname == "MATCH_CLASS" for i in dis.get_instructions(code)):
        yield "__match_args__"
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (c for c in constant if isinstance(c, str))


def _globals_and_items(
    parts: Sequence[types.CodeType],
) -> tuple[set[str], dict[str, frozenset[Any]]]:
    globals_: set[str] = set()
    items: dict[str, set[Any]] = {}
    whole: set[str] = set()
    for part in parts:
        instructions = list(dis.get_instructions(part))
        for i, instruction in enumerate(instructions):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                name = instruction.argval
                globals_.add(name)
                key = _item_key(instructions[i + 1 : i + 3])
                if key is None:
                    whole.add(name)
                else:
                    items.setdefault(name, set()).add(key[0])
    return globals_, {name: frozenset(keys) for name, keys in items.items() if name not in whole}


def _imports(code: types.CodeType) -> Iterator[tuple[str, int]]:
    """The modules that a code object imports: a name, after its level and the names taken from it."""
    instructions = [i for i in dis.get_instructions(code) if i.opname != "EXTENDED_ARG"]
    for i, instruction in enumerate(instructions):
        if instruction.opname == "IMPORT_NAME":
            yield instruction.argval, instructions[i - 2].argval


def _evaluated(parts: Sequence[types.CodeType]) -> Iterator[types.CodeType]:
    """The code in constant strings, where a function calls eval or exec."""
    for part in parts:
        if {"eval", "exec"}.isdisjoint(part.co_names):
            continue
        for constant in part.co_consts:
            if isinstance(constant, str):
                with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    yield compile(constant, "<string>", "exec")


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _item_key(following: list[dis.Instruction]) -> tuple[Any] | None:
    """The constant key with which the next two instructions take an item, as a tuple; or None."""
    if len(following) < 2:
        return None
    constant, take = following
    subscript = take.opname == "BINARY_SUBSCR" or (
        take.opname == "BINARY_OP" and take.argrepr == "[]"
    )
    if subscript and constant.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
        return (constant.argval,)
    return None


def functions_of_class(cls: type, code: Code) -> list[tuple[str, Any]]:
    """The attributes of a custom class that the code may use: named ones, and operators."""
    held = []
    for key, item in sorted(vars(cls).items()):
        operator = key.startswith("__") and (
            key not in _NOT_OPERATORS or not code.names.isdisjoint(_RUN_BY.get(key, ()))
        )
        if key in code.names or code.reflects or key == "forward" or operator:
            function, kind = _function_in(item), _kind(item)
            if operator and _by_dataclass(function):
                continue
            if function is not None or is_users_class(kind) or not hasattr(kind, "__get__"):
                held.append((key, item if function is None else function))
    return held


def _kind(item: Any) -> Any:
    return type(item)


def _by_dataclass(function: Any) -> bool:
    return getattr(getattr(function, "__code__", None), "co_filename", "") == "<string>"


# Special attributes that are not operators: functions that use an instance do not run them.
_NOT_OPERATORS = frozenset(
    (
        *("__init__", "__new__", "__del__", "__repr__", "__hash__", "__setattr__", "__delattr__"),
        *("__reduce__", "__getstate__", "__setstate__", "__init_subclass__"),
        *("__doc__", "__module__", "__qualname__", "__dict__", "__weakref__", "__slots__"),
        *("__firstlineno__", "__static_attributes__", "__abstractmethods__", "__match_args__"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
        *("__parameters__", "__orig_bases__", "__dataclass_fields__", "__dataclass_params__"),
    )
)


def constructors_of(cls: type) -> tuple[tuple[str, Any], ...]:
    """The functions that run when code calls a custom class."""
    keys = ("__new__", "__init__", "__post_init__")
    held = ((key, _function_in(vars(base).get(key))) for base in cls.__mro__ for key in keys)
    return tuple((key, fn) for key, fn in held if fn is not None and not _by_dataclass(fn))


def _function_in(item: Any) -> Any:
    """The function behind an attribute of a class."""
    if isinstance(item, property):
        return item.fget
    if isinstance(item, (staticmethod, classmethod)):
        return item.__func__
    if isinstance(item, functools.cached_property):
        return item.func
    if isinstance(item, functools.partialmethod):
        return functools.partial(item.func, *item.args, **item.keywords)
    return item if isinstance(item, types.FunctionType) else None


_BARE = (object, torch.nn.Module, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


@functools.lru_cache(4096)
def is_users_class(cls: Any) -> bool:
    """Whether a class is neither the standard library's, nor torch's, nor an installed package's."""
    module = sys.modules.get(cls.__module__)
    if module is None:
        return cls.__module__ not in sys.stdlib_module_names
    return not source.is_installed_module(module)


@functools.lru_cache(4096)
def is_library_class(cls: Any) -> bool:
    """Whether a base is of an installed package, whose code is not read and may use any attribute."""
    return any(
        base not in _BARE
        and not is_users_class(base)
        and base.__module__.partition(".")[0] not in sys.stdlib_module_names
        for base in cls.__mro__
    )


# Modules of the standard library whose classes hold what users put into them.
_CONTAINERS = frozenset(
    ("collections", "weakref", "_weakrefset", "queue", "argparse", "functools", "configparser", "string")
)


def is_standard_container(cls: Any) -> bool:
    """Whether a class is a container of the standard library, whose code may use any attribute."""
    return any(base.__module__ in _CONTAINERS for base in cls.__mro__)
