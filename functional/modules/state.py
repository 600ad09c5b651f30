"""What a call changes in a module, found and undone as a whole.

A call may set a flag and install a hook, or note in a list what it has prepared. If one of them were
undone and the other not, the next call would find a module that no sequence of calls makes. So everything
that a module holds is restored: attributes of its parts, their tables of tensors, modules and hooks, and
the containers and objects that attributes refer to. What belongs to a library (loggers, locks, compiled
functions) is not the module's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals

__all__ = ["Contents", "containers", "replaced_value", "undone"]

# What a module refers to and does not hold, or what a call does not change.
_OUTSIDE = (
    *(Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Generator),
    *(str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size),
)
# Objects of these packages belong to their library: compiled functions, loggers, locks.
_LIBRARIES = ("torch", "torchard", "logging", "threading", "functools")


class Contents:
    """What a module holds at one time.

    Attributes:
        module: the module.
        kept: each container, and what it contained.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kept = [(container, _copy(container)) for container in containers(module)]
        self._hooks = {
            id(vars(part)[key])
            for part in module.modules()
            for key in internals.HOOK_KEYS
            if key in vars(part)
        }

    def changed(self) -> list[tuple[Any, Any]]:
        """The containers that contain something else now, and what they contained."""
        return [(container, before) for container, before in self.kept if not _same(container, before)]

    def hooks_alone(self) -> bool:
        """Whether hooks changed, and nothing that could tell the next call so."""
        changed = self.changed()
        return bool(changed) and all(id(now) in self._hooks for now, _ in changed)

    def new_buffers(self) -> list[str]:
        """The names of buffers that the module did not have."""
        before = {id(container): contents for container, contents in self.kept}
        return [
            f"{path}.{key}".lstrip(".")
            for path, part in self.module.named_modules()
            for key in internals.buffer_table(part)
            if key not in before.get(id(internals.buffer_table(part)), {})
        ]

    def undo(self) -> None:
        """Make every container contain what it contained."""
        for container, before in self.changed():
            _restore(container, before)


@contextmanager
def undone(module: nn.Module) -> Iterator[Contents]:
    """A context at whose end everything that the module holds is as it was."""
    contents = Contents(module)
    try:
        yield contents
    finally:
        contents.undo()


def replaced_value(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Any:
    """A key under which a tensor or number took the place of another one, or None: that is state."""
    kinds = (Tensor, int, float)
    for key, old in before.items():
        new = after.get(key)
        if new is old or not (isinstance(old, kinds) and isinstance(new, kinds)):
            continue
        if isinstance(old, Tensor) or isinstance(new, Tensor) or new != old:
            return key
    return None


def containers(module: nn.Module) -> Iterator[Any]:
    """Everything mutable that a module holds, each once."""
    seen: set[int] = set()
    left: list[Any] = [module]
    while left:
        value = left.pop()
        if isinstance(value, _OUTSIDE) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            yield value
            left += (x for pair in dict.items(value) for x in pair)
        elif isinstance(value, (list, set, deque)):
            yield value
            left += value
        elif isinstance(value, (tuple, frozenset)):
            left += value
        elif isinstance(value, nn.Module) or _is_users(value):
            left.append(vars(value))


def _is_users(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return package not in _LIBRARIES and hasattr(value, "__dict__")


def _copy(container: Any) -> Any:
    kind = dict if isinstance(container, dict) else set if isinstance(container, set) else list
    return kind(container)


def _same(container: Any, before: Any) -> bool:
    """Whether a container has the objects that it had, in the same order."""
    if len(container) != len(before):
        return False
    if isinstance(container, set):
        return {id(x) for x in container} == {id(x) for x in before}
    now, then = _flat(container), _flat(before)
    return all(a is b for a, b in zip(now, then, strict=True))


def _flat(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [x for pair in dict.items(container) for x in pair]
    return list(container)


def _restore(container: Any, before: Any) -> None:
    add: Callable[[Any], Any] = (
        container.update if isinstance(container, (set, MutableMapping)) else container.extend
    )
    container.clear()
    add(before)
