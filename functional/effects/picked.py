"""``x[i]`` with an index that is a tensor without dims: torch reads its value, and selects a view.

A trace has no value of it, and records a lookup: a copy of what the view would show. A user's function
may distinguish them by writing to one and reading the other, which `check_picked` refuses, except for
``x[i] += value``, which Python writes back to where it was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.effects.mutation import storage_key, written_nodes
from torchard.functional.programs.tags import SOURCE
from torchard.functional.torch_internals.operators import aten

__all__ = ["Picked", "assign_picked", "check_picked", "is_picking", "pick"]

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
_INDICES = (torch.int32, torch.int64)
_MASKS = (torch.bool, torch.uint8)


@dataclass(eq=False)
class Picked:
    """A lookup that represents a view.

    Attributes:
        x: the tensor in which the row was looked up.
        row: the row that was looked up.
        out: the tensor that the user received: the row, or a view of it.
        node: the node of row.
        source: the node of x.
        index: the user's index.
        versions: the versions of the tensors in the index.
        restored: the writes that put the row back in its place.
    """

    x: torch.Tensor
    row: torch.Tensor
    out: torch.Tensor
    node: fx.Node
    source: fx.Node
    index: tuple[Any, ...]
    versions: list[int]
    restored: list[fx.Node]

    def is_read_as(self, value: Any, x: torch.Tensor, index: tuple[Any, ...]) -> bool:
        """Whether a value is what the user was given as ``x[index]``, and a view of the row."""
        if self.out is not value or self.x is not x or len(index) != len(self.index):
            return False
        if self.versions != _versions(index):
            return False
        row, out = map(internals.base_tensor, (self.row, self.out))
        is_view = internals.storage_id(row) == internals.storage_id(out)
        return is_view and all(map(_is_same, self.index, index))


# -- recording ------------------------------------------------------------------------------------


def is_picking(func: Any, args: Any) -> bool:
    """Whether a call of torch indexes a tensor by the value of a second tensor."""
    if func not in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
        return False
    return any(map(_is_number, _items(args[1])))


def pick(tracer: Any, picked: list[Picked], x: torch.Tensor, index: Any) -> torch.Tensor:
    """``x[index]``, which is added to what is picked."""
    at, rest = _parts(x, index, x.requires_grad)
    row: torch.Tensor = aten.index.Tensor(x, at)
    out = row[rest] if rest else row
    node, source = _node(tracer, row), _node(tracer, x)
    assert node is not None and source is not None  # it is recorded
    picked.append(Picked(x, row, out, node, source, _items(index), _versions(_items(index)), []))
    return out


def assign_picked(tracer: Any, picked: list[Picked], x: torch.Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``."""
    at, rest = _parts(x, index, x.requires_grad or getattr(value, "requires_grad", False))
    earlier = next((each for each in picked if each.is_read_as(value, x, _items(index))), None)
    if earlier is not None:
        value = earlier.row
    elif rest:
        row = aten.index.Tensor(x, at)
        row[rest] = value
        value = row
    elif not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    rank = x.ndim - sum(i is not None for i in at)
    aten.index_put_.default(x, at, _without_leading(value.to(x.dtype), rank))
    node = _node(tracer, x)
    if earlier is not None and node is not None:
        earlier.restored.append(node)


def _node(tracer: Any, tensor: torch.Tensor) -> fx.Node | None:
    return internals.proxy_node(tracer, internals.base_tensor(tensor))


def _is_same(item: Any, other: Any) -> bool:
    tensors = isinstance(item, torch.Tensor) or isinstance(other, torch.Tensor)
    return item is other if tensors else bool(item == other)


def _without_leading(value: torch.Tensor, rank: int) -> torch.Tensor:
    """A value without the dims of size 1 in front, which an assignment ignores."""
    while value.ndim > rank and value.shape[0] == 1:
        value = value[0]
    return value


def _versions(index: tuple[Any, ...]) -> list[int]:
    return [internals.version(internals.base_tensor(i)) for i in index if isinstance(i, torch.Tensor)]


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_number(item: Any) -> bool:
    """Whether an item of an index is a tensor that torch reads as a number, which the trace has not."""
    if not isinstance(item, torch.Tensor) or item.ndim or item.dtype not in _INTEGERS:
        return False
    return not internals.is_known(internals.base_tensor(item))


def _parts(
    x: torch.Tensor, index: Any, saved: bool
) -> tuple[list[torch.Tensor | None], tuple[Any, ...]]:
    """The numbers, each at its dim of x, and the index of what they leave.

    Args:
        saved: whether autograd keeps the numbers, which the user may count up in place after this.
    """
    items = _items(index)
    at: list[torch.Tensor | None] = []
    rest: list[Any] = []
    for item in items:
        if _is_number(item):
            item = item if item.dtype in _INDICES else item.long()
            at.append(item.clone() if saved else item)
            continue
        at += [None] * (x.ndim - sum(map(_taken, items)) if item is Ellipsis else _taken(item))
        rest.append(item)
    while rest and (rest[-1] is Ellipsis or _is_all(rest[-1])):
        rest.pop()
    return at, tuple(rest)


def _is_all(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _taken(item: Any) -> int:
    """How many dims an item of an index is for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, torch.Tensor) and item.dtype in _MASKS else 1


# -- checking -------------------------------------------------------------------------------------


def check_picked(graph: fx.Graph, picked: Sequence[Picked]) -> None:
    """Check that a graph computes the same as if the lookups were views.

    Raises:
        PurityError: memory is read that was written to through a view of it; names both lines.
    """
    if picked:
        _Check(picked).run(graph)


class _Check:
    """A walk over a recorded graph.

    Attributes:
        related: storage -> the storages with which views would share memory.
        stale: storage that is out of date after a write to a related storage -> the node that wrote.
        known: the storages so far.
    """

    def __init__(self, picked: Sequence[Picked]) -> None:
        self.restored = {node: each for each in picked for node in each.restored}
        self.related: dict[int | None, set[int | None]] = {}
        self.stale: dict[int | None, fx.Node] = {}
        self.known = set[int | None]()
        for each in picked:
            ends = storage_key(each.node), storage_key(each.source)
            joined = set[int | None]().union(*(self.related.get(end, {end}) for end in ends))
            self.related.update(dict.fromkeys(joined, joined))

    def run(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            restored = self.restored.get(node)
            if restored is not None:
                self.stale.pop(storage_key(restored.source), None)
            for source in node.all_input_nodes:
                if (writer := self.stale.get(storage_key(source))) is not None:
                    raise _refusal(node, writer)
            for target in written_nodes(node):
                self._write(node, storage_key(target))
            self.known.add(storage_key(node))
            if restored is not None:
                self.stale.pop(storage_key(restored.node), None)

    def _write(self, node: fx.Node, memory: int | None) -> None:
        for other in self.related.get(memory, ()):
            if other != memory and other in self.known:
                self.stale[other] = node


def _refusal(reader: fx.Node, writer: fx.Node) -> PurityError:
    read, written = (SOURCE.get(node) or "the result of the function" for node in (reader, writer))
    return PurityError(
        f"{written} writes in place ({writer.target}) to memory that x[i], where i is a tensor, shares "
        f"with a value that is read later ({read}). In a trace x[i] is a copy, because i is not known. "
        "Write with the index: x[i] = value or x[i] += value, and read x[i] again afterwards."
    )
