"""Copies of modules without weights, and which names of a module are of one tensor."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchard.functional.modules.state import containers

__all__ = ["hollow", "owner_of", "plain_tensors", "ties"]


def hollow(module: nn.Module, constants: list[Tensor]) -> nn.Module:
    """A copy of the module with its parameters and buffers on the meta device, tied as they are."""
    _check_initialized(module)
    memo: dict[int, Any] = {id(t): t for t in constants}
    for tensor in (*module.parameters(), *module.buffers()):
        empty: Tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        memo[id(tensor)] = empty
    copied = copy.deepcopy(module, memo)
    parts = {id(part): memo[id(part)] for part in module.modules()}
    for container in containers(copied):
        if isinstance(container, dict):
            container.update({k: _rebound(v, parts) for k, v in container.items() if _is_closure(v)})
    return copied


def _check_initialized(module: nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = next((k for k, t in tensors if is_lazy(t)), None)
    if lazy is not None:
        raise ValueError(
            f"functionalize: {lazy!r} gets its shape in the first call of its lazy module. Run the "
            "module once before functionalize."
        )


def _is_closure(value: Any) -> bool:
    return isinstance(value, FunctionType) and bool(value.__closure__)


def _rebound(function: FunctionType, parts: Mapping[int, nn.Module]) -> FunctionType:
    """A function (a hook) that closes over the copies of the modules that it closed over.

    `copy.deepcopy` copies bound methods, and takes functions as they are.
    """
    cells = function.__closure__ or ()
    found = [_cell(cell, parts) for cell in cells]
    if all(a is b for a, b in zip(cells, found, strict=True)):
        return function
    code, named = function.__code__, function.__globals__
    rebound = FunctionType(code, named, function.__name__, function.__defaults__, tuple(found))
    rebound.__kwdefaults__ = function.__kwdefaults__
    vars(rebound).update(vars(function))
    return rebound


def _cell(cell: CellType, parts: Mapping[int, nn.Module]) -> CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # empty: nothing has been assigned yet
        return cell
    if _is_closure(value):
        rebound = _rebound(value, parts)
        return cell if rebound is value else CellType(rebound)
    return CellType(parts[id(value)]) if id(value) in parts else cell


def plain_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors in plain attributes of modules. The copy shares them, so that a trace finds them."""
    registered = {id(t) for t in (*module.parameters(), *module.buffers())}
    held = [v for part in module.modules() for v in vars(part).values() if isinstance(v, Tensor)]
    return [t for t in held if id(t) not in registered]


def ties(module: nn.Module) -> dict[str, str]:
    """The first name of each tied parameter and buffer, by its other names."""
    first: dict[int, str] = {}
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for path, tensor in named:
        first.setdefault(id(tensor), path)
    ties = {path: first[id(tensor)] for path, tensor in named if first[id(tensor)] != path}
    # A module under two paths has its tensors once.
    return {
        path: one
        for path, one in ties.items()
        if module.get_submodule(owner_of(path)) is not module.get_submodule(owner_of(one))
        or path.rpartition(".")[2] != one.rpartition(".")[2]
    }


def owner_of(path: str) -> str:
    return path.rpartition(".")[0]
