"""Parameters and buffers of stacked layers that a module reads outside of its loop over them.

During a call the layers have other tables of tensors, which make a row of the stack when one is read. So
whatever torch reads a tensor by (an attribute, `parameters()`, a state dict) finds it, and rows that are
not read cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchard.functional import torch_internals as internals
from torchard.functional.modules.copying import deep_copy
from torchard.functional.tracing.trace_state import tracing

__all__ = ["LayerTables", "holding", "tables_of"]


class _Rows(dict[str, Any]):
    """A table of one module of a layer, whose tensors are rows of stacks, made as they are read.

    Attributes:
        stacks: the stacks, by the table's keys.
        number: the row.
        parameters: whether the table is that of parameters.
        made: the rows that were returned, by the table's keys, each with the context that it was made
            in: there and within, the same row is read again.
    """

    def __init__(
        self, table: Mapping[str, Any], stacks: Mapping[str, Tensor], number: int, parameters: bool
    ) -> None:
        super().__init__(table)
        self.stacks, self.number, self.parameters = stacks, number, parameters
        self.made: dict[str, list[tuple[Sequence[Any], Tensor]]] = {}
        self._before = dict(table)

    def __getitem__(self, key: str) -> Any:
        held = super().__getitem__(key)
        if key not in self.stacks or held is not self._before.get(key):
            return held
        here = _context()
        for context, row in self.made.get(key, ()):
            if here[: len(context)] == context and _is_live(row):
                return row
        with torch.enable_grad():  # as a parameter, it requires grad wherever it is read
            row = self.stacks[key][self.number]
        if self.parameters:
            internals.mark_parameter(row)
        self.made.setdefault(key, []).append((here, row))
        return row

    def __setitem__(self, key: str, value: Any) -> None:
        ours = any(value is row for _, row in self.made.get(key, ()))
        super().__setitem__(key, self._before[key] if ours else value)

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __iter__(self) -> Iterator[str]:  # with one of its own, dict() and ** read by keys as well
        return super().__iter__()

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __reduce_ex__(self, protocol: Any) -> Any:  # for copies and pickles
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {key: value if value is None else deep_copy(value, memo) for key, value in self.items()}

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        value = self[key]
        del self[key]
        return value

    def values(self) -> Any:
        return {key: self[key] for key in self}.values()

    def items(self) -> Any:
        return {key: self[key] for key in self}.items()

    def replaced(self) -> str | None:
        """A key that has another tensor, or none, than it had before the call."""
        keys = dict.fromkeys((*self._before, *self))
        held = dict(dict.items(self))
        return next((key for key in keys if held.get(key) is not self._before.get(key)), None)


def _context() -> Sequence[Any]:
    """The traces and levels of torch.func that run, outermost first."""
    return [internals.in_inference_mode(), *map(id, tracing()), *internals.level_kinds()]


def _is_live(row: Tensor) -> bool:
    """Whether the trace or level that made a row has not ended."""
    return internals.ended(row) is None and not internals.of_ended_level(row)


Table = tuple[dict[str, Any], str, dict[str, Any]]  # a module's attributes, the table's name in them, it


@contextmanager
def holding(tables: Sequence[Table]) -> Iterator[None]:
    """A context in which modules have these tables, in place of those that they have."""
    before = [(attributes, name, attributes[name]) for attributes, name, _ in tables]
    for attributes, name, table in tables:
        attributes[name] = table
    try:
        yield
    finally:
        for attributes, name, table in before:
            attributes[name] = table


def tables_of(layer: nn.Module) -> list[Table]:
    """The tables of parameters and buffers of a layer's modules."""
    return [
        (vars(part), name, table)
        for part in layer.modules()
        for name, table in internals.tensor_tables(part).items()
    ]


class LayerTables:
    """The tables of all modules of stacked layers during a call.

    Args:
        layers: the layers.
        stacks: the stacked tensors, by their names within a layer.
    """

    def __init__(self, layers: Sequence[nn.Module], stacks: Mapping[str, Tensor]) -> None:
        self.stacks = stacks
        self._rows = [list(_rows(layer, stacks, i)) for i, layer in enumerate(layers)]

    def readable(self) -> AbstractContextManager[None]:
        """A context in which the layers' tensors are rows of the stacks."""
        return holding([table for layer in self._rows for table in layer])

    def replaced(self, number: int) -> str | None:
        """The name of a tensor of a layer that the module replaced in this call."""
        return next((key for *_, rows in self._rows[number] if (key := rows.replaced())), None)

    def versions(self) -> list[int]:
        """The versions of the stacks."""
        return [internals.version(internals.base_tensor(stack)) for stack in self.stacks.values()]


def _rows(
    layer: nn.Module, stacks: Mapping[str, Tensor], number: int
) -> Iterator[tuple[dict[str, Any], str, _Rows]]:
    for path, part in layer.named_modules():
        prefix = f"{path}." if path else ""
        for name, table in internals.tensor_tables(part).items():
            of_part = {key: stacks[prefix + key] for key in table if prefix + key in stacks}
            yield vars(part), name, _Rows(table, of_part, number, name == internals.PARAMETERS)
