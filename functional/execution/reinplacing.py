"""Reinplacing: a write whose base is dead afterwards is made in the base's memory.

A program has no writes: ``y[i] = x`` is a `select_scatter`, which copies ``y``. But where nothing reads
``y`` any more, only the row need be written, as it was in the function that was traced. So a loop over
rows moves bytes in proportion to the rows, and a cache that is donated is never copied. (Inductor's pass
of this name does the same to what torch.compile functionalized.)

What may be written is decided on the list of what runs: it is run with storages in the place of tensors,
and a node writes if in each of its executions

- its base is all of one storage that the program *owns*: an operation allocated it, or the caller gave it
  up. No argument, constant, or result of a function that may return memory of its own is owned;
- nothing reads the storage later, through whatever alias: not the caller, as a result or residual, not a
  collective under way, and no function that may keep its operands;
- no other operand is in the storage.

A part of a part is written in one step: ``y[i][j] = x`` is the scatter of ``y[i]``, into which ``x`` was
scattered, back to where it lies in ``y``.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.execution.instructions import (
    Assign,
    Compute,
    For,
    Instruction,
    Return,
    Shifted,
    When,
    Write,
)
from torchard.functional.execution.storages import Allocation, Fresh, StorageGroup, StorageRun
from torchard.functional.programs.markers import total
from torchard.functional.programs.tags import LOOP, SHAPE, STAGE, VAL
from torchard.functional.programs.views import is_dense, is_view
from torchard.functional.torch_internals.operators import COLLECTIVES, aten

__all__ = ["Reinplaced", "reinplaced"]

HalfOf = Callable[[fx.Node], Any]

# Operator -> the view of its first operand to which it copies its second one.
_PARTS: dict[Any, Any] = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
}

# Operator -> the operator that does the same in its first operand.
_TWINS: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_reduce.default: aten.index_reduce_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.reduce: aten.scatter_.reduce,
    aten.scatter.value_reduce: aten.scatter_.value_reduce,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.put.default: aten.put_.default,
    aten.copy.default: aten.copy_.default,
}

# Copies that are not made: the value lies in the operand.
_COPIES = (aten.clone.default,)

# Of these, those whose results may be larger than the base.
_BROADCAST = (
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_scatter.default,
)

# Views of all elements: what is written to one is as good as written to its base.
_WHOLE: frozenset[Any] = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten._reshape_alias.default,
        aten.reshape.default,
        aten.contiguous.default,
        aten.alias.default,
        aten.detach.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)

# Operators of these namespaces keep none of their operands once they are awaited.
_KEEP_NOTHING = ("aten", "prims", "torchard", "torchard_kernels", "inductor", COLLECTIVES)


class Reinplaced(NamedTuple):
    """Instructions with writes.

    Attributes:
        nodes: those that write to their base, in order, each with whether its value already lies there.
        taken: the positions of the inputs that are written to.
    """

    instructions: Sequence[Instruction]
    nodes: Mapping[fx.Node, bool] = {}
    taken: Sequence[int] = ()


def reinplaced(
    instructions: Sequence[Instruction],
    inputs: Sequence[fx.Node],
    donated: Collection[int] = (),
    half_of: HalfOf = lambda node: None,
) -> Reinplaced:
    """The instructions, with writes where memory may be written.

    Args:
        inputs: the nodes of the inputs.
        donated: the positions of the inputs that the caller does not keep.
        half_of: the half of a joint program that a node is in: each has a list of its own, whose inputs
            are not written.
    """
    candidates = [node for node in _computed(instructions) if _base(node) is not None]
    if not candidates:
        return Reinplaced(instructions)
    run = _Run(inputs, donated, half_of, set(candidates))
    run.all(instructions)
    nodes = _which_write(candidates, run)
    alone = run.alone() if donated else []
    taken = [i for i in donated if run.is_written(i, nodes)]
    return Reinplaced(_rewritten(instructions, nodes, alone), nodes, taken)


def _which_write(candidates: Sequence[fx.Node], run: _Run) -> dict[fx.Node, bool]:
    """The candidates that write, each with whether its value already lies in its base."""
    put_back = {inner: outer for outer in candidates if (inner := _put_back(outer)) is not None}
    found: dict[fx.Node, bool] = {}
    for node in reversed(candidates):
        inside, outer = {node}, put_back.get(node)
        while outer is not None and outer in found:
            inside.add(outer)
            outer = put_back.get(outer)
        if run.may_write(node, inside):
            found[node] = False
    found.update((outer, True) for inner, outer in put_back.items() if inner in found)
    found.update((node, True) for node in found if node.target in _COPIES)
    return {node: found[node] for node in candidates if node in found}


def _computed(instructions: Sequence[Instruction]) -> Iterator[fx.Node]:
    for each in instructions:
        if isinstance(each, (For, When, Shifted)):
            yield from _computed(each.body)
        elif isinstance(each, Compute):
            yield each.node


def _base(node: fx.Node) -> fx.Node | None:
    """The operand that an operation copies, and writes to."""
    copies = node.target in _COPIES and not node.kwargs
    known = copies or node.target in _PARTS or node.target in _TWINS
    base = node.args[0] if known and node.args else None
    if not isinstance(base, fx.Node) or (node.target in _BROADCAST and _shape(node) != _shape(base)):
        return None
    return base


def _shape(node: fx.Node) -> Any:
    value = VAL.get(node)
    return SHAPE.get(node, node) if value is None else value.shape


def _put_back(outer: fx.Node) -> fx.Node | None:
    """The write to a part of a base whose result this node scatters back to where the part lies."""
    part_of = _PARTS.get(outer.target)
    inner = outer.args[1] if part_of is not None else None
    if not isinstance(inner, fx.Node) or len(inner.users) > 1 or LOOP.get(inner) is not LOOP.get(outer):
        return None
    part = _base(inner)
    if part is None or part.target is not part_of or LOOP.get(part) is not LOOP.get(outer):
        return None
    there = (outer.args[0], *outer.args[2:]), outer.kwargs
    return inner if (tuple(part.args), part.kwargs) == there else None


def _reads_another_part(node: fx.Node) -> bool:
    """Whether a write copies from a part of its base to another, as ``y[0] = y[1]`` does."""
    base, part = node.args[0], node.args[1]
    while isinstance(part, fx.Node) and is_view(part) and part.args[0] is not base:
        part = part.args[0]
    if not isinstance(part, fx.Node) or not is_view(part):
        return False
    (dim, read), (other, written) = _along(part, part.args[1:]), _along(node, node.args[2:])
    return dim is not None and dim == other and (read.stop <= written.start or written.stop <= read.start)


def _along(node: fx.Node, at: Sequence[Any]) -> tuple[int | None, range]:
    """The dim along which a part is taken, and its indices there; None if these are not known."""
    selects = node.target in (aten.select.int, aten.select_scatter.default)
    slices = node.target in (aten.slice.Tensor, aten.slice_scatter.default)
    if selects and min(at) >= 0:
        return at[0], range(at[1], at[1] + 1)
    if slices and len(at) > 2 and all(isinstance(x, int) and x >= 0 for x in at[:3]):
        return at[0], range(at[1], at[2])
    return None, range(0)


# -- lifetimes -------------------------------------------------------------------------------------


class _Part(StorageGroup):
    """A view of a part of a storage, or what may be a view of some storages."""


@dataclass
class _Known:
    """What is known of a storage.

    Attributes:
        half: the half of the program that allocates it.
        owned: whether the program may write to it at all.
        dense: whether its first tensor has no gaps.
        reads: the events at which it is read, each with the node.
    """

    half: Any
    owned: bool
    dense: bool
    reads: list[tuple[int, fx.Node | None]] = field(default_factory=list)


class _Try(NamedTuple):
    """One execution of a candidate: its event, its base's value, and whether another operand is there."""

    at: int
    base: Any
    shared: bool


class _Run(StorageRun):
    """A run that notes what reads storages, and when.

    A value is an `Allocation` if it is all of one, else a `_Part` of those that it may be a part of.
    """

    def __init__(
        self,
        inputs: Sequence[fx.Node],
        donated: Collection[int],
        half_of: HalfOf,
        candidates: Collection[fx.Node],
    ) -> None:
        super().__init__(inputs, donated, lambda node: Fresh(None, 0))
        self.half_of = half_of
        self.known: dict[Allocation, _Known] = {}
        self.tries: dict[fx.Node, list[_Try]] = {node: [] for node in candidates}
        self.arguments: list[Allocation] = []
        self.returned: list[list[Allocation]] = []

    def may_write(self, node: fx.Node, inside: Collection[fx.Node]) -> bool:
        """Whether a candidate may write, in each execution.

        Args:
            inside: the node, and the writes after it that only put its result back to where it lies.
        """
        return all(self._may_write(node, one, inside) for one in self.tries[node])

    def _may_write(self, node: fx.Node, one: _Try, inside: Collection[fx.Node]) -> bool:
        storages = list(_storages_in(one.base))
        if one.shared or len(storages) != 1:
            return False
        known = self.known[storages[0]]
        # Copies of a base with gaps have the strides of the base only if a part is written.
        alike = len(inside) > 1 or (
            isinstance(one.base, Allocation) and (known.dense or node.target in _PARTS)
        )
        same_half = known.half == self.half_of(node)
        later = {reader for at, reader in known.reads if at > one.at}
        return known.owned and alike and same_half and later.issubset(inside)

    def is_written(self, position: int, nodes: Iterable[fx.Node]) -> bool:
        """Whether one of these nodes writes to an input."""
        given = self.arguments[position]
        return any(given in _storages_in(one.base) for node in nodes for one in self.tries[node])

    # -- what runs ----------------------------------------------------------------------------------

    def _inputs(self, names: Sequence[str]) -> None:
        super()._inputs(names)
        for number, (node, slot) in enumerate(zip(self.inputs, names, strict=True)):
            value = VAL.get(node)
            dense = is_dense(value) if isinstance(value, torch.Tensor) else number in self.donated
            owned = number in self.donated and dense
            self.arguments.append(self.slots[slot])
            self.known[self.slots[slot]] = _Known(self.half_of(node), owned, dense)

    def computed(self, node: fx.Node, operands: Any, i: int | None) -> Any:
        """What an operation returns: memory of its own, or what may be views of its operands."""
        operands = operands.items if isinstance(operands, StorageGroup) else operands
        values = dict(zip(node.all_input_nodes, operands, strict=True))
        at = len(self.live.order)
        self.live.order.append(node)
        if node in self.tries:
            base = values.pop(node.all_input_nodes[0])  # the first operand
            others = list(values.values())
            shared = not set(_storages_in(base)).isdisjoint(_storages_in(StorageGroup(others)))
            shared = shared and not _reads_another_part(node)
            self.tries[node].append(_Try(at, base, shared))
        used = list(dict.fromkeys(_storages_in(StorageGroup(list(operands)))))
        self._read(used, at, node)
        if _namespace(node) not in _KEEP_NOTHING:
            self._read(used, sys.maxsize, None)
        return self._result(node, operands, used, i)

    def _result(
        self, node: fx.Node, operands: Sequence[Any], used: list[Allocation], i: int | None
    ) -> Any:
        if node.target in _WHOLE:
            return operands[0]
        if STAGE.get(node) == "wait" and isinstance(operands[0], _Issued):
            return operands[0].items[0]
        if internals.makes_new_memory(node.target):
            dense = node.target not in _PARTS or any(self.known[x].dense for x in used[:1])
            return _items(node, lambda k: self._new(node, k, i, True, dense))
        if STAGE.get(node) == "issue" and not internals.is_mutable(node.target):
            return _Issued([self._new(node, 0, i, False, False), *used])
        unknown = [] if is_view(node) else [self._new(node, 0, i, False, False)]
        part = _Part([*used, *unknown])
        return _items(node, lambda _: part)

    def _new(self, node: fx.Node, item: int, i: int | None, owned: bool, dense: bool) -> Allocation:
        new = self._allocated(node, item, Fresh(None, 0), len(self.live.order) - 1, i)
        value = VAL.get(node)
        dense = is_dense(value) if isinstance(value, torch.Tensor) else dense
        self.known[new] = _Known(self.half_of(node), owned, dense)
        return new

    def _read(self, storages: Iterable[Allocation], at: int, node: fx.Node | None) -> None:
        for storage in storages:
            self.known[storage].reads.append((at, node))

    def _row(self, stack: Any) -> Any:
        return _Part(list(_storages_in(stack)))

    def _collect(self, reader: fx.Node | None, into: StorageGroup, value: Any) -> None:
        """Rows are copied; a sum begins in the first value's memory."""
        assert reader is not None
        storages = list(_storages_in(value))
        self._read(storages, len(self.live.order), None)
        if not into.items:
            new = self._new(reader, 0, None, reader.target is not total, True)
            into.items = [_Part([new, *storages]) if reader.target is total else new]

    def _return(self, value: Any) -> None:
        storages = list(_storages_in(value))
        self._read(storages, sys.maxsize, None)
        self.returned.append(storages)

    def alone(self) -> list[int]:
        """The results that are all that is returned of some memory of the program's own."""
        counts = Counter(storage for storages in self.returned for storage in storages)
        return [
            i
            for i, storages in enumerate(self.returned)
            if storages and all(self.known[x].owned and counts[x] == 1 for x in storages)
        ]


class _Issued(_Part):
    """The result of a collective under way, and after it what the collective uses."""


def _storages_in(value: Any) -> Iterator[Allocation]:
    if isinstance(value, Allocation):
        yield value
    elif isinstance(value, StorageGroup):
        for each in value.items:
            yield from _storages_in(each)


def _items(node: fx.Node, one: Callable[[int], Any]) -> Any:
    """The value of a node, or of each item of its tuple."""
    items = [int(str(user.args[1])) for user in node.users if user.target is operator.getitem]
    return StorageGroup([one(k) for k in range(max(items) + 1)]) if items else one(0)


def _namespace(node: fx.Node) -> str:
    return str(getattr(node.target, "namespace", ""))


# -- instructions ----------------------------------------------------------------------------------


def _rewritten(
    instructions: Sequence[Instruction], nodes: Mapping[fx.Node, bool], alone: Sequence[int]
) -> list[Instruction]:
    return [_one(each, nodes, alone) for each in instructions]


def _one(each: Instruction, nodes: Mapping[fx.Node, bool], alone: Sequence[int]) -> Instruction:
    match each:
        case For() | When() | Shifted():
            return replace(each, body=_rewritten(each.body, nodes, alone))
        case Return():
            return replace(each, alone=alone)
        case Compute(node, slot, slots) if node in nodes:
            base: Any = node.args[0]
            if nodes[node]:
                return Assign(node, [slot], [slots[base]])
            part = _PARTS.get(node.target)
            write = aten.copy_.default if part is not None else _TWINS[node.target]
            return Write(node, slot, slots, write, part)
    return each
