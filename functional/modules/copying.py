"""Copies of modules without weights, and which names of a module are of one tensor."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchard.functional import torch_internals as internals
from torchard.functional.modules.containers import read
from torchard.functional.modules.rebinding import Rebinding, memory_of
from torchard.functional.modules.state import containers

__all__ = ["deep_copy", "hollow", "owner_of", "plain_tensors", "ties"]


def hollow(
    module: nn.Module, constants: list[Tensor], memo: dict[int, Any] | None = None
) -> tuple[nn.Module, list[Any]]:
    """A copy of the module with its parameters and buffers on the meta device, tied as they are.

    Args:
        module: the module.
        constants: tensors that the copy shares.
        memo: the memo of the `copy.deepcopy` that copies the module.

    Returns:
        The copy, and the objects to which only its functions refer.
    """
    _check_initialized(module)
    memo = {} if memo is None else memo
    memo |= {id(t): t for t in constants}
    for tensor in (*module.parameters(), *module.buffers()):
        empty: Tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        memo[id(tensor)] = empty
    before = dict(memo)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:  # whatever the class of an attribute raises
        raise _uncopied(module, before, error) from error
    rebinding = Rebinding(module, memo)
    rebinding.within(copied)
    return copied, rebinding.private


def _uncopied(module: nn.Module, memo: dict[int, Any], error: Exception) -> TypeError:
    """The error of a module that has no deep copy, with the attribute that has none, if it is one."""
    where = type(module).__name__
    for path, part in module.named_modules():
        for key, value in vars(part).items():
            if not key.startswith("_") and not isinstance(value, nn.Module) and _fails(value, memo):
                where = f"its {f'{path}.{key}'.lstrip('.')} (a {type(value).__name__})"
    return TypeError(
        f"functionalize({type(module).__name__}) works on a copy, and copy.deepcopy cannot copy {where}: "
        f"{error}. Keep it outside of the module, make it in the forward, or give its class a "
        "__deepcopy__; a tensor that was computed is copied if it is detached."
    )


def _fails(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return True
    return False


def deep_copy(value: Tensor, memo: dict[int, Any]) -> Tensor:
    """A deep copy of a tensor of a call: as of the module's own, gradients stop there."""
    if id(value) not in memo:
        copied = value.detach().clone()
        if isinstance(value, nn.Parameter):
            internals.mark_parameter(copied)
        memo[id(value)] = copied
        memo.setdefault(id(memo), []).append(value)  # kept, as `copy.deepcopy` does
    found: Tensor = memo[id(value)]
    return found


def _check_initialized(module: nn.Module) -> None:
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = next((k for k, t in tensors if is_lazy(t)), None)
    if lazy is not None:
        raise ValueError(
            f"functionalize: {lazy!r} gets its shape in the first call of its lazy module. Run the "
            "module once before functionalize."
        )


def plain_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors in plain attributes of modules. The copy shares them, so that a trace finds them.

    So it does views of parameters and buffers in containers, which a call refuses to use.
    """
    registered = (*module.parameters(), *module.buffers())
    ids, memory = set(map(id, registered)), set(map(memory_of, registered)) - {0}
    held = [v for part in module.modules() for v in vars(part).values()]
    inside = [v for container in containers(module) for v in read(container)]
    tensors = [t for t in held if isinstance(t, Tensor)]
    tensors += [t for t in inside if isinstance(t, Tensor) and memory_of(t) in memory]
    return [t for t in tensors if id(t) not in ids]


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
