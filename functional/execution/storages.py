"""Storages: the memory that what runs holds, and when.

The list of what runs (instructions.py) says which slot holds what until when, so it is run with storages
in the place of tensors: an operation allocates its results, a view refers to its operand's storage, and a
storage is alive as long as a slot, a list or a tuple refers to it. What a collective reads and writes is
alive until it is awaited. Arguments are the caller's, and so are held throughout unless they are donated.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from torchard.functional.core.spans import Span, bytes_at
from torchard.functional.execution.instructions import (
    Assign,
    Compute,
    Drop,
    Get,
    Inputs,
    Instruction,
    New,
    Pack,
    Put,
    Read,
    Return,
    Write,
    executed,
)
from torchard.functional.programs.markers import total
from torchard.functional.programs.tags import COLLECTIVE, STAGE

__all__ = [
    *("Allocation", "Fresh", "Liveness", "Results", "StorageGroup", "StorageRun"),
    *("alive", "in_items"),
]


class Fresh(NamedTuple):
    """A result in memory of its own."""

    value: Any
    nbytes: int


Results = Callable[[fx.Node], Any]
"""What a node computes: a `Fresh`, the operand whose storage it is in, None for what is no tensor, or a
list of these for a tuple."""


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage.

    Attributes:
        node, item: the first node of which it is a result, and the result's index.
        value: the result.
        nbytes: its size.
        begin, end: the first and the last of the events at which it is alive; inputs begin at -1.
        row: the row of the iteration that allocates it, if any.
        kind: ``"argument"``, ``"result"``, ``"collective"`` for a collective's buffer, or ``"value"``.
    """

    node: fx.Node
    item: int
    value: Any
    nbytes: int
    begin: int
    row: int | None = None
    end: int = -1
    kind: str = "value"
    references: int = 0


@dataclass
class Liveness:
    """When each storage is alive.

    Attributes:
        order: the node of each event: an operation in an iteration, or one whose rows or sum are begun.
        allocations: all storages.
    """

    order: list[fx.Node] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    def held(self, without: Iterable[fx.Node] = ()) -> list[int]:
        """Bytes alive at each event, including its result, without those of some nodes."""
        skipped = set(without)
        spans = (Span(a.begin, a.end, a.nbytes) for a in self.allocations if a.node not in skipped)
        return bytes_at(spans, len(self.order))

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return max(self._held_from_entry())

    def at_peak(self) -> list[Allocation]:
        """The storages that are alive when most bytes are."""
        held = self._held_from_entry()
        at = held.index(max(held)) - 1
        return [a for a in self.allocations if a.begin <= at <= a.end and a.nbytes]

    def _held_from_entry(self) -> list[int]:
        """Bytes alive before the first event, with donated arguments that nothing reads, and at each."""
        return [sum(a.nbytes for a in self.allocations if a.begin < 0), *self.held()]


def alive(
    instructions: Sequence[Instruction],
    inputs: Sequence[fx.Node],
    donated: Collection[int],
    results: Results,
) -> Liveness:
    """When the storages of what runs are alive.

    Args:
        donated: the positions of the inputs that the caller does not keep.
    """
    live = StorageRun(inputs, donated, results).all(instructions)
    for allocation in live.allocations:
        if allocation.references:
            allocation.end = len(live.order)
    return live


class StorageGroup:
    """What is in a tuple or list, each as long as that is referred to."""

    __slots__ = ("items", "references")

    def __init__(self, items: list[Any]) -> None:
        self.items, self.references = items, 0
        for each in items:
            if each is not None:
                each.references += 1


class _Collected(StorageGroup):
    """The rows or the sum of a loop's values: a sum begins in the first value's memory."""

    __slots__ = ("of_own",)

    def __init__(self) -> None:
        super().__init__([])
        self.of_own = False


def in_items(node: fx.Node, one: Callable[[int], Any]) -> Any:
    """The value of a node: one, or one for each item of a tuple that is read.

    Args:
        one: what is in the item of an index.
    """
    items = [int(str(user.args[1])) for user in node.users if user.target is operator.getitem]
    return StorageGroup([one(k) for k in range(max(items) + 1)]) if items else one(0)


class StorageRun:
    """Runs instructions with storages in the place of tensors."""

    def __init__(
        self, inputs: Sequence[fx.Node], donated: Collection[int], results: Results
    ) -> None:
        self.inputs, self.donated, self.results = inputs, donated, results
        self.live = Liveness()
        self.slots: dict[str, Any] = {}
        # By the result of a collective under way, what it uses.
        self.under_way: dict[Any, list[StorageGroup]] = {}

    def all(self, instructions: Sequence[Instruction]) -> Liveness:
        """Run instructions; returns what they hold."""
        for instruction, i in executed(instructions):
            self._one(instruction, i)
        return self.live

    def _one(self, instruction: Instruction, i: Any) -> None:
        """Run an instruction, in the iteration of row i."""
        slots = self.slots
        match instruction:
            case Compute(node, slot, of, given):
                operands = slots.pop(given) if given else [slots[of[n]] for n in node.all_input_nodes]
                self._set(slot, self.computed(node, operands, i))
                self._release(operands if given else None)
            case Write(node, slot):
                self.live.order.append(node)
                self._set(slot, slots[instruction.base])
            case Drop(gone):
                for slot in gone:
                    self._release(slots.pop(slot))
            case Inputs(names):
                self._inputs(names)
            case Pack(_, slot, values, of):
                self._set(slot, StorageGroup([slots[of[value]] for value in values]))
            case Read(_, slot, source, index, how):
                index = i if index is None else index
                held = slots[source]
                self._set(slot, self._row(held, index) if how == "row" else held.items[index])
                if how == "out":
                    self._replace(slots[source], index, None)
            case New(slot, kind, count):
                self._set(slot, StorageGroup([None] * count) if kind == "list" else _Collected())
            case Put(node, slot, source, listed, only):
                value = None if source is None else slots[source]
                if not listed:
                    self._collect(node, slots[slot], value, i)
                elif not only or i in only:
                    self._replace(slots[slot], i, value)
            case Get(_, slot, source):
                self._set(slot, slots[source].items[0])
            case Assign(_, names, sources):
                for slot, value in zip(names, [slots[source] for source in sources], strict=True):
                    self._set(slot, value)
            case Return(values, of):
                for value in values:
                    self._return(slots[of[value]] if isinstance(value, fx.Node) else None)

    def _inputs(self, names: Sequence[str]) -> None:
        for number, (node, slot) in enumerate(zip(self.inputs, names, strict=True)):
            storage = self._allocated(node, 0, self.results(node), -1)
            storage.kind = "argument"
            storage.references += number not in self.donated
            self._set(slot, storage)

    def _row(self, stack: Any, index: int) -> Any:
        """A row of a stack."""
        return stack

    def _return(self, value: Any) -> None:
        if value is not None:
            value.references += 1
        if isinstance(value, Allocation) and value.kind != "argument":
            value.kind = "result"

    # -- storages -----------------------------------------------------------------------------------

    def computed(self, node: fx.Node, operands: Any, i: int | None) -> Any:
        """The result of an operation.

        Args:
            operands: its operands, in the order of ``node.all_input_nodes``; in a `StorageGroup` if the
                operation takes over its operands.
        """
        at = len(self.live.order)
        self.live.order.append(node)
        held = dict(zip(node.all_input_nodes, operands, strict=True))

        def result(found: Any, item: int) -> Any:
            if isinstance(found, Fresh):
                return self._allocated(node, item, found, at, i)
            operand = held.get(found)
            return operand.items[0] if isinstance(operand, StorageGroup) else operand  # of a transfer

        found = self.results(node)
        several = isinstance(found, list)
        items = [result(each, k) for k, each in enumerate(found if several else [found])]
        if COLLECTIVE.on(node):
            self._communicate(node, [*operands, items[0]])
        return StorageGroup(items) if several else items[0]

    def _communicate(self, node: fx.Node, used: list[Any]) -> None:
        """A step of a collective, the last of whose storages is its result."""
        for storage in used:
            if isinstance(storage, Allocation) and storage.kind == "value":
                storage.kind = "collective"
        if STAGE.get(node) == "issue":
            self.under_way.setdefault(used[-1], []).append(group := StorageGroup(used))
            group.references += 1
        elif STAGE.get(node) == "wait":
            for group in self.under_way.pop(used[-1], ()):
                self._release(group)

    def _allocated(
        self, node: fx.Node, item: int, fresh: Fresh, at: int, i: int | None = None
    ) -> Allocation:
        allocation = Allocation(node, item, *fresh, at, i)
        self.live.allocations.append(allocation)
        return allocation

    def _collect(self, reader: fx.Node | None, into: _Collected, value: Any, i: Any) -> None:
        """Add a value of row i: rows are in a buffer, and a sum is from its second term on."""
        assert reader is not None
        if reader.target is total and not into.items:
            into.items.append(None)
            self._replace(into, 0, value)
        elif not into.of_own:
            into.of_own = True
            at = len(self.live.order)
            self.live.order.append(reader)
            into.items = into.items or [None]
            self._replace(into, 0, self._allocated(reader, 0, self.results(reader), at))

    def _set(self, slot: str, value: Any) -> None:
        if value is not None:
            value.references += 1
        self._release(self.slots.get(slot))
        self.slots[slot] = value

    def _replace(self, group: StorageGroup, index: int, value: Any) -> None:
        if value is not None:
            value.references += 1
        self._release(group.items[index])
        group.items[index] = value

    def _release(self, value: Any) -> None:
        if value is None:
            return
        value.references -= 1
        if value.references:
            return
        if isinstance(value, Allocation):
            value.end = len(self.live.order) - 1
        else:
            for each in value.items:
                self._release(each)
