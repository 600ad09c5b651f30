"""Functions, bound methods and weak references that a module holds, for its copy.

`copy.deepcopy` takes functions and weak references as they are.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import PurityError
from torchard.functional.guards.present_cells import copied
from torchard.functional.modules.containers import (
    cells,
    is_plain,
    mapped,
    read,
    same,
    write,
)
from torchard.functional.modules.state import containers

__all__ = ["Rebinding", "memory_of"]


class Rebinding:
    """What refers to a module, its parts or tensors, referring to those of a copy.

    Objects of users' classes to which a function refers are shared with the module: what a hook collects
    in one is there after a call. Plain containers with parts or tensors in them are copied.

    Args:
        module: the module.
        memo: the copies of what it holds, by the ids, as `copy.deepcopy` has it.

    Attributes:
        private: the functions and containers that were made here.
    """

    def __init__(self, module: nn.Module, memo: dict[int, Any]) -> None:
        named = [*module.named_parameters(), *module.named_buffers()]
        own = [*module.modules(), *(tensor for _, tensor in named)]
        self._memo = memo
        self._copies = {id(x): memo[id(x)] for x in own}
        self._memory = {memory_of(tensor): path for path, tensor in named if memory_of(tensor)}
        self._functions: dict[int, FunctionType] = {}
        self.private: list[Any] = []

    def within(self, copied: Any) -> None:
        """Rebind the contents of a copy's containers."""
        for container in containers(copied):
            held = read(container)
            rebound = [mapped(value, self._of_function) for value in held]
            if not same(container, rebound):
                write(container, rebound)

    def _of_function(self, value: Any) -> Any:
        """A function that closes over the copies, a weak reference to one, or the value itself."""
        if isinstance(value, FunctionType) and self._reaches(value, value, set()):
            return self._function(value)
        if type(value) is weakref.ref and isinstance(value(), nn.Module):
            return weakref.ref(self._copies.get(id(value()), value()))
        return value

    def _of_cell(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, MethodType) and id(value.__self__) in self._copies:
            return MethodType(value.__func__, self._copies[id(value.__self__)])
        if is_plain(value) and self._reaches(value, None, set()):
            copied = copy.deepcopy(value, self._memo)
            self.within(copied)
            self.private.append(copied)
            return copied
        return self._of_function(value)

    def _reaches(self, value: Any, function: FunctionType | None, seen: set[int]) -> bool:
        """Whether a part or tensor is among what functions and plain containers refer to."""
        if id(value) in self._copies:
            return True
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, FunctionType):
            return any([self._reaches(x, value, seen) for x in _contents(value)])
        if isinstance(value, Tensor) and function is not None:
            self._check(function, value)
        if isinstance(value, (tuple, frozenset)) or is_plain(value):
            held: Iterable[Any] = read(value) if is_plain(value) else value
            return any([self._reaches(x, function, seen) for x in held])
        if isinstance(value, MethodType):
            return id(value.__self__) in self._copies
        return type(value) is weakref.ref and id(value()) in self._copies

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._functions:
            return self._functions[id(function)]
        rebound = copied(function, self._functions, self._of_inside)
        rebound.__defaults__ = self._of_inside(function.__defaults__)
        rebound.__kwdefaults__ = _each(function.__kwdefaults__, self._of_inside)
        vars(rebound).update(_each(vars(function), self._of_inside))
        self.private += [rebound, vars(rebound), rebound.__kwdefaults__ or {}]
        return rebound

    def _of_inside(self, value: Any) -> Any:
        return mapped(value, self._of_cell)

    def _check(self, function: FunctionType, tensor: Tensor) -> None:
        """Refuse a tensor that is no parameter, and would change with one."""
        path = self._memory.get(memory_of(tensor))
        if path is not None:
            code = function.__code__
            raise PurityError(
                f"{source.of_code(code)}, which the module calls, closes over a view or a detached "
                f"copy of {path!r}, and would not see the value of a call. Create the view where it is "
                "used, from the module's parameter or buffer."
            )


def _contents(function: FunctionType) -> list[Any]:
    """The objects to which a function refers: its closure, defaults and attributes."""
    held = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return [*(cell.cell_contents for cell in cells(function)), *held, *vars(function).values()]


def _each(named: dict[str, Any] | None, find: Callable[[Any], Any]) -> Any:
    return named and {key: find(value) for key, value in named.items()}


def memory_of(tensor: Tensor) -> int:
    """The number of a tensor's memory; 0 for one that is no ordinary tensor."""
    tensor = internals.base_tensor(tensor)
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return internals.unseen_storage_id(tensor) if plain else 0
