"""Functions and weak references that a module holds, for its copy.

`copy.deepcopy` takes both as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core import user_lines as source
from torchard.functional.core.errors import PurityError

__all__ = ["Rebinding", "memory_of"]


class Rebinding:
    """What refers to a module or its parts, referring to those of a copy.

    Args:
        module: the module.
        copies: the copies of its parts, by the ids of the parts.
    """

    def __init__(self, module: nn.Module, copies: Mapping[int, Any]) -> None:
        self._parts = {id(part): copies[id(part)] for part in module.modules()}
        named = [*module.named_parameters(), *module.named_buffers()]
        self._registered = {id(tensor) for _, tensor in named}
        self._memory = {memory_of(tensor): path for path, tensor in named if memory_of(tensor)}
        self._functions: dict[int, FunctionType] = {}

    def of(self, value: Any) -> Any:
        """A function that closes over the copies, a weak reference to one, or the value itself."""
        if isinstance(value, FunctionType) and value.__closure__ and self._reaches(value, set()):
            return self._function(value)
        if isinstance(value, weakref.ref) and type(value) is weakref.ref:
            return weakref.ref(self._parts[id(value())]) if id(value()) in self._parts else value
        return value

    def _reaches(self, function: FunctionType, seen: set[int]) -> bool:
        """Whether a function, or one that it closes over, closes over a part."""
        seen.add(id(function))
        reaches = False
        for value in _contents(function):
            if isinstance(value, FunctionType):
                reaches |= id(value) not in seen and self._reaches(value, seen)
            elif isinstance(value, Tensor):
                self._check(function, value)
            else:
                reaches |= self._of_cell(value) is not value
        return reaches

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._functions:
            return self._functions[id(function)]
        cells = tuple(CellType() for _ in function.__closure__ or ())
        code, named = function.__code__, function.__globals__
        rebound = FunctionType(code, named, function.__name__, function.__defaults__, cells)
        self._functions[id(function)] = rebound  # it may close over itself
        rebound.__kwdefaults__ = function.__kwdefaults__
        vars(rebound).update(vars(function))
        filled = [(old, new) for old, new in zip(function.__closure__ or (), cells, strict=True)]
        for old, new in filled:
            if _is_filled(old):
                new.cell_contents = self._of_cell(old.cell_contents)
        return rebound

    def _of_cell(self, value: Any) -> Any:
        return self._parts[id(value)] if id(value) in self._parts else self.of(value)

    def _check(self, function: FunctionType, tensor: Tensor) -> None:
        """Refuse a tensor that is no parameter, and would change with one."""
        path = self._memory.get(memory_of(tensor))
        if path is not None and id(tensor) not in self._registered:
            code = function.__code__
            raise PurityError(
                f"{source.of_code(code)}, which the module calls, closes over a view or a detached copy "
                f"of {path!r}, and would not see the value that a call is given. Take it where it is "
                "used, of the module's parameter or buffer."
            )


def _contents(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return False
    return True


def memory_of(tensor: Tensor) -> int:
    """The number of a tensor's memory; 0 for one that is no ordinary tensor."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return internals.storage_id(tensor) if plain else 0
