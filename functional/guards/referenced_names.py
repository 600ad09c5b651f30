"""The names in code: globals, attributes, items. They bound what a function can read."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torchard.functional.core import user_lines as source

__all__ = ["Code", "code_of", "functions_of_class", "is_library_class", "is_users_class"]

# Functions that may read attributes whose names are not in the code.
_REFLECTION = frozenset(
    (
        *("getattr", "vars", "__dict__", "attrgetter", "asdict", "astuple", "fields", "dir"),
        *("copy", "deepcopy"),
    )
)


@dataclass(frozen=True)
class Code:
    """The names in one or several functions.

    Attributes:
        names: attributes, and strings that may be looked up.
        globals: global names.
        items: for a global name that is only used for items with constant keys, these keys.
    """

    names: frozenset[Any] = frozenset()
    globals: frozenset[str] = frozenset()
    items: dict[str, frozenset[Any]] = field(default_factory=dict, compare=False)

    def __or__(self, other: Code) -> Code:
        return Code(self.names | other.names)

    @property
    def reflects(self) -> bool:
        """Whether attributes may be read whose names are not in the code."""
        return not _REFLECTION.isdisjoint(self.names)


@functools.lru_cache(4096)
def code_of(code: types.CodeType) -> Code:
    """The names in a code object and in those nested in it."""
    names: set[Any] = set()
    globals_: set[str] = set()
    items: dict[str, set[Any]] = {}
    whole: set[str] = set()
    for part in _nested(code):
        names |= {*part.co_names, *(c for c in part.co_consts if isinstance(c, str))}
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
    only = {name: frozenset(keys) for name, keys in items.items() if name not in whole}
    return Code(frozenset(names), frozenset(globals_), only)


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
    """The attributes of a class of the user's that the code may use: named ones, and operators."""
    held = []
    for key, item in sorted(vars(cls).items()):
        operator = key.startswith("__") and key not in _NOT_OPERATORS
        if key in code.names or code.reflects or key == "forward" or operator:
            function = _function_in(item)
            if operator and function is not None and function.__code__.co_filename == "<string>":
                continue  # written by dataclasses
            if function is not None or not hasattr(type(item), "__get__"):
                held.append((key, item if function is None else function))
    return held


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


def _function_in(item: Any) -> Any:
    """The function behind an attribute of a class."""
    if isinstance(item, property):
        return item.fget
    if isinstance(item, (staticmethod, classmethod)):
        return item.__func__
    if isinstance(item, functools.cached_property):
        return item.func
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
