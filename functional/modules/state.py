"""The changes of a call in a module, found and undone together.

A call may set a flag and install a hook, or record its preparations in a list. If one of them were undone
and the other not, the next call would find a module that no sequence of calls makes. So everything that a
module holds is restored: attributes of its parts, their tables of tensors, modules and hooks, and the
containers and objects that attributes refer to. Objects of libraries (loggers, locks, compiled functions)
do not belong to the module.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.guards.references import References
from torchard.functional.modules.containers import is_container, is_users, read, same, write

__all__ = ["Contents", "containers", "kept_apart", "replaced_value", "undone"]

# Types of objects to which a module refers without holding them, or which a call does not change.
_OUTSIDE = (
    *(Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, torch.Generator),
    *(str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size),
)

_LAZY = (GeneratorType, map, filter, zip)
_VIEWS = tuple(map(type, ({}.keys(), {}.values(), {}.items())))
_CALLED = (FunctionType, MethodType, *_VIEWS)


class Contents:
    """The contents of a module at one time.

    Args:
        module: the module.
        private: functions and containers that only the module's functions refer to.

    Attributes:
        kept: each container with its contents before the call.
        put: container id -> the contents that replace the container's during a call.
    """

    def __init__(self, module: nn.Module, private: Sequence[Any] = ()) -> None:
        self.module = module
        found = (*containers(module, *private), *(x for x in private if isinstance(x, FunctionType)))
        self.kept = [(container, read(container)) for container in found]
        self._ids = {id(container) for container in found}
        self.put: dict[int, list[Any]] = {}
        self._dicts = [container for container, held in self.kept if _is_quick(container, held)]
        self._others = [pair for pair in self.kept if not _is_quick(*pair)]
        self._sizes = [*map(len, self._dicts)]
        self._keys, self._values = self._in_dicts()
        self._hooks = {
            id(vars(part)[key])
            for part in module.modules()
            for key in internals.HOOK_KEYS
            if key in vars(part)
        }

    def _in_dicts(self) -> tuple[list[Any], list[Any]]:
        flat = chain.from_iterable
        return [*flat(map(dict.keys, self._dicts))], [*flat(map(dict.values, self._dicts))]

    def unchanged(self) -> bool:
        """Whether the contents of every container are unchanged."""
        if [*map(len, self._dicts)] != self._sizes:
            return False
        keys, values = self._in_dicts()
        if not (all(map(is_, values, self._values)) and all(map(is_, keys, self._keys))):
            return False
        return all(same(*pair) for pair in self._others)

    def changed(self) -> list[tuple[Any, list[Any]]]:
        """The containers whose contents have changed, with their former contents."""
        if self.unchanged():
            return []
        now = [(x, self.put.get(id(x), held)) for x, held in self.kept if not same(x, held)]
        return [(container, before) for container, before in now if not same(container, before)]

    def hooks_alone(self) -> bool:
        """Whether hooks changed, and nothing that could tell the next call so."""
        changed = self.changed()
        return bool(changed) and all(id(now) in self._hooks for now, _ in changed)

    def has_any(self, containers: Iterable[Any]) -> bool:
        """Whether one of these is the module's."""
        return not self._ids.isdisjoint(map(id, containers))

    def new_buffers(self) -> list[str]:
        """The names of buffers that the module did not have."""
        before = {id(container): held for container, held in self.kept}
        return [
            f"{path}.{key}".lstrip(".")
            for path, part in self.module.named_modules()
            for key in internals.buffer_table(part)
            if key not in before.get(id(internals.buffer_table(part)), [])[::2]
        ]

    def undo(self) -> None:
        """Restore the former contents of every container."""
        self.put = {}
        for container, before in self.changed():
            write(container, before)


def _is_quick(container: Any, held: list[Any]) -> bool:
    """Whether a container is a dict whose order is that of its keys: any other, if it was not empty."""
    return isinstance(container, dict) and not (held and isinstance(container, OrderedDict))


def kept_apart(out: Any, contents: Contents) -> Any:
    """A result, with copies of the containers in it that the module holds, which will be undone.

    Raises:
        PurityError: something in it would be computed when the call has ended.
    """
    found = [*containers(out)]
    items = [*_items([out, *chain.from_iterable(map(read, found))])]
    lazy = next((type(x).__name__ for x in items if isinstance(x, _LAZY)), None)
    if lazy is not None:
        raise PurityError(
            f"the forward of {type(contents.module).__name__} returns a {lazy}, which would run after "
            "the call, when the module has no values. Return a list of its items."
        )
    late = next((x for x in items if isinstance(x, _CALLED) and _uses(x, contents.module)), None)
    if late is not None:
        raise PurityError(
            f"the forward of {type(contents.module).__name__} returns a {type(late).__name__} that "
            "reads the module, which has no values after the call. Return tensors instead."
        )
    if not contents.has_any(found):
        return out
    return copy.deepcopy(out, {id(x): x for x in items if isinstance(x, (*_OUTSIDE, nn.Module))})


def _uses(value: Any, module: nn.Module) -> bool:
    """Whether what is read of a function or view later leads to a part of a module, or its tensors."""
    references = References(lambda tensor: False)
    references.search(value, "")
    parts = list(module.modules())
    own = (*parts, *(table for part in parts for table in vars(part).values() if type(table) is dict))
    return any(id(x) in references.objects for x in own)


def _items(values: Iterable[Any]) -> Iterator[Any]:
    """Values, and those in tuples among them."""
    for value in values:
        yield value
        if isinstance(value, (tuple, frozenset)):
            yield from _items(value)


@contextmanager
def undone(contents: Contents) -> Iterator[Contents]:
    """A context at whose end everything that a module holds is as it was."""
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


def containers(*roots: Any) -> Iterator[Any]:
    """Everything mutable that modules and objects hold, each once."""
    seen: set[int] = set()
    left: list[Any] = [*roots]
    while left:
        value = left.pop()
        if isinstance(value, _OUTSIDE) or id(value) in seen:
            continue
        seen.add(id(value))
        if is_container(value):
            yield value
            left += read(value)
        elif isinstance(value, (tuple, frozenset)):
            left += value
        elif isinstance(value, MethodType):
            left.append(value.__self__)
        if isinstance(value, nn.Module) or (is_users(value) and hasattr(value, "__dict__")):
            left.append(vars(value))
