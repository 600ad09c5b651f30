"""Slots: the places that hold the objects a function reads, by how they are read again."""

from __future__ import annotations

import hashlib
import types
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterable, KeysView, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from torchard.functional.core.placed import is_placed
from torchard.functional.core.tensor_spec import TensorSpec

__all__ = ["Slots", "contents", "entries_of", "is_value", "kind_of"]

# Arrays up to this size are compared with a copy, larger ones with a digest.
_ARRAY_BYTES = 1 << 16


def is_value(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_placed(value)


def entries_of(mapping: dict[Any, Any]) -> ItemsView[Any, Any]:
    """The items of a dict, in order."""
    return _base(mapping).items(mapping)


def _base(mapping: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Whose methods give what a dict holds; an OrderedDict has its own order besides the dict's."""
    return OrderedDict if isinstance(mapping, OrderedDict) else dict


def contents(values: Any) -> bytes:
    """The bytes of an array or a buffer; of a large one, their digest."""
    if isinstance(values, np.ma.MaskedArray):  # whose own method changes it
        held = np.ndarray.tobytes(values) + np.ma.getmaskarray(values).tobytes()
    else:
        held = values.tobytes() if isinstance(values, np.ndarray) else bytes(values)
    return held if len(held) <= _ARRAY_BYTES else hashlib.blake2b(held).digest()


def kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided
        return "tensor", type(value), TensorSpec.of(value) if strided else (value.shape, value.layout)
    return "placed", value.__torchard_placed__()[:4] if is_placed(value) else None


class Slots:
    """The slots that hold objects, by how they are read.

    Attributes:
        facts: functions, each with the result that it had; results are compared by value.
        gets: functions that return the object in a slot.
        typed: objects whose class may be replaced.
        absent: keys of dicts, each with names that are not among them.
    """

    def __init__(self) -> None:
        self.facts: list[tuple[Callable[[], Any], Any]] = []
        self.gets: list[Callable[[], Any]] = []
        self.typed: list[Any] = []
        self.absent: list[tuple[KeysView[Any], frozenset[Any]]] = []
        self._named: dict[int, tuple[Any, dict[Any, None]]] = {}
        self._missing: dict[int, tuple[Any, set[Any]]] = {}
        self.empty: list[Any] = []
        self.cells: list[types.CellType] = []
        self.picks: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        self.keyed: list[Any] = []
        self.values: list[Any] = []
        self.sized: list[Any] = []
        self.sets: list[tuple[Any, Any]] = []
        self.arrays: list[tuple[Any, bytes]] = []

    def pick(self, owner: Any, names: Sequence[str], by: Callable[..., Any]) -> None:
        """Add some entries or attributes of an object."""
        if names:
            # A getter of one name would not return a tuple.
            self.picks.append((by(*names, names[0]), owner))

    def name(self, names: Any, known: Sequence[Any], missing: Iterable[Any] = ()) -> None:
        """Add some entries of a namespace, and names that it lacks.

        Many functions share one namespace, so `finish` adds its slots, each once.
        """
        self._named.setdefault(id(names), (names, {}))[1].update(dict.fromkeys(known))
        self._missing.setdefault(id(names), (names, set()))[1].update(missing)

    def finish(self) -> None:
        """Add the slots of all namespaces."""
        for names, known in self._named.values():
            self.pick(names, [*known], itemgetter)
        self.absent += [(names.keys(), frozenset(keys)) for names, keys in self._missing.values() if keys]

    def whole(self, mapping: dict[Any, Any]) -> None:
        """Add all entries of a dict."""
        if mapping:
            self.keyed.append(mapping)
            self.values.append(_base(mapping).values(mapping))
        else:
            self.empty.append(mapping)

    def sequence(self, values: Any) -> None:
        """Add all items of a list."""
        if values:
            self.sized.append(values)
            self.values.append(values)
        else:
            self.empty.append(values)
