"""Where a copy of a module has its own tensors: there a call puts the values that it is given."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.modules.containers import mapped, same, write
from torchard.functional.modules.state import Contents

__all__ = ["Places"]


class Places:
    """The containers, in a copy of a module, whose tensors a call replaces by its own.

    Args:
        contents: the contents of the copy.
        names: the names of the copy's own tensors, by id. In the copy's tables, a tensor that replaced an
            own tensor has the own tensor's name.
        known: the names of the values that a call has.
        ties: the first name of each tied tensor, by its other names.

    Raises:
        PurityError: a parameter or buffer that no call has a value for has none itself.
    """

    def __init__(
        self,
        contents: Contents,
        names: Mapping[int, str],
        known: Collection[str],
        ties: Mapping[str, str],
    ) -> None:
        self.contents = contents
        self._names = names
        tables = dict(_tables(contents.module))
        buffers = {id(internals.buffer_table(part)) for part in contents.module.modules()}
        self._held: list[tuple[Any, list[Any], dict[int, str], list[int]]] = []
        self._buffers: list[tuple[dict[str, Any], str, str]] = []
        for container, held in contents.kept:
            prefix = tables.get(id(container))
            named = ((i, names.get(id(x))) for i, x in enumerate(held))
            direct = {i: name for i, name in named if name is not None and name in known}
            if prefix is not None:
                direct |= _by_name(prefix, held, names, known)
            if id(container) in buffers:
                for i, name in direct.items():
                    path, key = f"{prefix}{held[i - 1]}", held[i - 1]
                    self._buffers.append((container, key, path if ties.get(path) == name else name))
            inside = [i for i, x in enumerate(held) if mapped(x, self._found_in(known)) is not x]
            nested = [i for i in inside if i not in direct]
            if direct or nested:
                self._held.append((container, held, direct, nested))

    def _found_in(self, values: Any) -> Any:
        """A function that finds a call's value for an own tensor."""
        of_call = values if isinstance(values, Mapping) else dict.fromkeys(values)
        return lambda x: of_call.get(self._names.get(id(x)), x)

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Put a call's values in all places."""
        find = self._found_in(values)
        put = self.contents.put
        for container, held, direct, nested in self._held:
            new = list(held)
            for i, name in direct.items():
                new[i] = values[name]
            for i in nested:
                new[i] = mapped(held[i], find)
            put[id(container)] = new
            write(container, new)

    def clear(self) -> None:
        """Restore the former contents, except where the call made changes."""
        for container, held, *_ in self._held:
            if same(container, self.contents.put.get(id(container), held)):
                write(container, held)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that the module has now, by the names of those whose places they have."""
        return {name: table[key] for table, key, name in self._buffers if table.get(key) is not None}


def _tables(module: nn.Module) -> Iterator[tuple[int, str]]:
    """The tables of a module's parameters and buffers, by their ids, and the paths of their owners."""
    for path, part in module.named_modules():
        for table in internals.tensor_tables(part).values():
            yield id(table), f"{path}." if path else ""


def _by_name(
    prefix: str, held: list[Any], names: Mapping[int, str], known: Collection[str]
) -> dict[int, str]:
    """The names of the tensors in a table that took the places of own ones."""
    found = {}
    for i in range(1, len(held), 2):
        name = f"{prefix}{held[i - 1]}"
        if not isinstance(held[i], Tensor) or id(held[i]) in names:
            continue
        if name in known:
            found[i] = name
        elif held[i].is_meta:
            raise PurityError(
                f"the module of a functionalized function now has {name!r}, which it did not have when "
                "it was functionalized, so calls have no value for it. Change the module before "
                "functionalize, or functionalize the changed module."
            )
    return found
