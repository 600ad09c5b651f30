"""Who reads memory, and when: what is written in place must not be read later.

The list of what runs is run with storages in the place of tensors (storages.py), and each storage notes
the operations that read it, through whatever view. What cannot be known counts as a read: a function
that is no operator of torch may return views of its operands, and may keep them for ever.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.execution.storages import (
    Allocation,
    Fresh,
    StorageGroup,
    StorageRun,
    in_items,
)
from torchard.functional.programs.markers import Loop, total
from torchard.functional.programs.tags import LOOP, STAGE, VAL
from torchard.functional.programs.views import is_dense, is_view
from torchard.functional.torch_internals.operators import COLLECTIVES, aten
from torchard.functional.updates.in_place import written_operands

__all__ = ["HalfOf", "MemoryPart", "MemoryReads", "WriteUse", "storages_in", "writes_of_call"]

HalfOf = Callable[[fx.Node], Any]

# What lies in the memory of all elements of the first operand, or in a copy.
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
        # running sums
        aten.add_.Tensor,
        aten.addmm_.default,
    }
)

# Operators of these namespaces keep none of their operands once they are awaited; a kernel that is a
# user's may.
_KEEP_NOTHING = ("aten", "prims", "torchard", "inductor", COLLECTIVES)

_NEVER = sys.maxsize  # the event of what is read by the caller, or may be read at any time


class MemoryPart(StorageGroup):
    """A view of a part of a storage, or what may be a view of some storages."""


class _Issued(MemoryPart):
    """The result of a collective under way, and after it what the collective uses."""


@dataclass
class _Known:
    """What is known of a storage, or of a row of one.

    Attributes:
        half: the half of the program that allocates it.
        owned: whether the program may write to it at all.
        dense: whether it has no gaps.
        stack: the storage that it is a row of.
        rows: its rows that are read, by index.
        reads: the events at which it is read, each with the node; None for the caller.
    """

    half: Any
    owned: bool
    dense: bool
    stack: Allocation | None = None
    rows: dict[int, Allocation] = field(default_factory=dict)
    reads: list[tuple[int, fx.Node | None]] = field(default_factory=list)


class WriteUse(NamedTuple):
    """One execution of a write.

    Attributes:
        at: its event.
        base, result: the values of its first operand, and of its result in other memory.
        shared: whether another operand is in the memory of the base.
    """

    at: int
    base: Any
    result: Any
    shared: bool


class MemoryReads(StorageRun):
    """A run that notes what reads storages.

    A value is an `Allocation` if it is all of one, or a row of one; else a `MemoryPart` of those that it
    may be a part of.

    Attributes:
        known: by storage, what is known of it.
        uses: by write, its executions.
        collected: by reader of a loop's stacked values, each value with its row.
        stacked: by such a reader, the storage of the stack.
    """

    def __init__(
        self,
        inputs: Sequence[fx.Node],
        donated: Collection[int],
        half_of: HalfOf,
        writes: Iterable[fx.Node],
    ) -> None:
        super().__init__(inputs, donated, lambda node: Fresh(None, 0))
        self.half_of = half_of
        self.known: dict[Allocation, _Known] = {}
        self.uses: dict[fx.Node, list[WriteUse]] = {node: [] for node in writes}
        self.collected: dict[fx.Node, list[tuple[int, Any]]] = {}
        self.stacked: dict[fx.Node, Allocation] = {}
        self.arguments: list[Allocation] = []
        self.returned: list[list[Allocation]] = []

    def after(self, storage: Allocation, at: int) -> set[tuple[int, fx.Node | None]]:
        """The later events that read a storage, each with what reads; None stands for the caller."""
        known = self.known[storage]
        parts = [known, *(self.known[row] for row in known.rows.values())]
        if known.stack is not None:
            parts.append(self.known[known.stack])
        return {(when, reader) for part in parts for when, reader in part.reads if when > at}

    @cached_property
    def _bases(self) -> dict[Allocation, Allocation]:
        """The base of each write, by the storage of its result in other memory."""
        return {
            result: base
            for uses in self.uses.values()
            for use in uses
            for result in storages_in(use.result)
            for base in storages_in(use.base)
        }

    def is_read_in_time(self, node: fx.Node, inside: Collection[fx.Node]) -> bool:
        """Whether the result of a write is read only before anything else is written to its memory.

        Args:
            inside: the node, and the writes after it that only put its result back to where it lies.
        """
        whole = self._bases

        def root(value: Any) -> Allocation | None:
            storage = next(storages_in(value), None)
            while storage in whole:
                storage = whole[storage]
            return storage and self.all_of(storage)

        others = [n for n in self.uses if n is node or n not in inside]
        writes = [(use.at, root(use.base)) for n in others for use in self.uses[n]]
        for use in self.uses[node]:
            memory = root(use.base)
            next_write = min((at for at, of in writes if at > use.at and of is memory), default=_NEVER)
            reads = (at for x in storages_in(use.result) for at, _ in self.known[x].reads)
            if max(reads, default=0) >= next_write:
                return False
        return True

    def written(self, writes: Iterable[fx.Node]) -> set[Allocation]:
        """The storages that these writes are to."""
        bases = (x for node in writes for use in self.uses[node] for x in storages_in(use.base))
        return set(map(self.all_of, bases))

    def may_lie_in_rows(self, reader: fx.Node, loop: Loop, written: Collection[Allocation]) -> bool:
        """Whether a loop's values and the stack of them may be in one memory.

        Not if a value is written, or the stack while the values are still read one by one.

        Args:
            reader: what reads the values, stacked.
            written: the storages that something is written to.
        """
        values = {x for _, value in self.collected[reader] for x in storages_in(value)}
        readers = (by for x in values for _, by in self.known[x].reads if by is not reader)
        read_later = any(by is None or LOOP.get(by) is not loop for by in readers)
        return values.isdisjoint(written) and not (read_later and self.stacked[reader] in written)

    def alone(self) -> list[int]:
        """The results that are all that is returned of some memory of the program's own."""
        counts = Counter(storage for storages in self.returned for storage in storages)
        return [
            i
            for i, storages in enumerate(self.returned)
            if storages and all(self.known[x].owned and counts[x] == 1 for x in storages)
        ]

    def all_of(self, storage: Allocation) -> Allocation:
        """The storage that a row is of."""
        return self.known[storage].stack or storage

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
        at = len(self.live.order)
        self.live.order.append(node)
        used = list(dict.fromkeys(storages_in(StorageGroup(list(operands)))))
        self._read(used, at, node)
        namespace = str(getattr(node.target, "namespace", ""))
        if namespace not in _KEEP_NOTHING and writes_of_call(node) is None:
            self._read(used, _NEVER, None)
        result = self._result(node, operands, used, i)
        if node in self.uses:
            values = dict(zip(node.all_input_nodes, operands, strict=True))
            others: list[Any] = []
            fx.map_arg((node.args[1:], node.kwargs), lambda n: others.append(values[n]))
            self._use(node, at, operands[0], others, result)
        for written, position in (writes_of_call(node) or {}).items():
            others = [*operands[:position], *operands[position + 1 :]]
            self._use(written, at, operands[position], others, result.items[written.args[1]])
        return result

    def _use(self, node: fx.Node, at: int, base: Any, others: list[Any], result: Any) -> None:
        memory, other = (set(map(self.all_of, storages_in(x))) for x in (base, StorageGroup(others)))
        self.uses[node].append(WriteUse(at, base, result, not memory.isdisjoint(other)))

    def _result(
        self, node: fx.Node, operands: Sequence[Any], used: list[Allocation], i: int | None
    ) -> Any:
        if node.target in _WHOLE:
            return operands[0]
        if bases := written_operands(node):
            values = dict(zip(node.all_input_nodes, operands, strict=True))
            return in_items(node, lambda k: values[bases[k]])
        if STAGE.get(node) == "wait" and isinstance(operands[0], _Issued):
            return operands[0].items[0]
        if internals.makes_new_memory(node.target):
            # copies of what has gaps may have gaps
            dense = node not in self.uses or all(self.known[x].dense for x in storages_in(operands[0]))
            return in_items(node, lambda k: self._new(node, k, i, True, dense))
        if STAGE.get(node) == "issue" and not internals.is_mutable(node.target):
            return _Issued([self._new(node, 0, i, False, False), *used])
        unknown = [] if is_view(node) else [self._new(node, 0, i, False, False)]
        part = MemoryPart([*used, *unknown])
        fresh: Any = [] if writes_of_call(node) is None else getattr(node.target, "fresh", [])


        def item(k: int) -> Any:
            return self._new(node, k, i, False, False) if any(fresh[k : k + 1]) else part

        return in_items(node, item)

    def _new(self, node: fx.Node, item: int, i: int | None, owned: bool, dense: bool) -> Allocation:
        new = self._allocated(node, item, Fresh(None, 0), len(self.live.order) - 1, i)
        value = VAL.get(node)
        dense = is_dense(value) if isinstance(value, torch.Tensor) else dense
        self.known[new] = _Known(self.half_of(node), owned, dense)
        return new

    def _read(self, storages: Iterable[Allocation], at: int, node: fx.Node | None) -> None:
        for storage in storages:
            self.known[storage].reads.append((at, node))

    def _row(self, stack: Any, index: int) -> Any:
        if not isinstance(stack, Allocation) or self.known[stack].stack is not None:
            return MemoryPart(list(storages_in(stack)))
        known = self.known[stack]
        if index not in known.rows:
            row = self._allocated(stack.node, stack.item, Fresh(None, 0), stack.begin, index)
            known.rows[index] = row
            self.known[row] = _Known(known.half, known.owned, known.dense, stack)
        return known.rows[index]

    def _collect(self, reader: fx.Node | None, into: StorageGroup, value: Any, i: int) -> None:
        """Rows are copied; a sum begins in the first value's memory."""
        assert reader is not None
        storages = list(storages_in(value))
        self._read(storages, len(self.live.order), reader)
        self.collected.setdefault(reader, []).append((i, value))
        if not into.items:
            new = self._new(reader, 0, None, reader.target is not total, True)
            into.items = [MemoryPart([new, *storages]) if reader.target is total else new]
            self.stacked[reader] = new

    def _return(self, value: Any) -> None:
        storages = list(storages_in(value))
        self._read(storages, _NEVER, None)
        self.returned.append(storages)


def writes_of_call(node: fx.Node) -> dict[fx.Node, int] | None:
    """The results of a call that are one of its operands with some elements written, in other memory.

    Returns:
        By item, the position of the operand; None of a function that does not say so.
    """
    rewritten: Any = getattr(node.target, "rewritten", None)
    if rewritten is None:
        return None
    items = {user.args[1]: user for user in node.users}
    return {items[result]: operand for result, operand in rewritten.items() if result in items}


def storages_in(value: Any) -> Iterator[Allocation]:
    """The storages that a value is, or may be, in."""
    if isinstance(value, Allocation):
        yield value
    elif isinstance(value, StorageGroup):
        for each in value.items:
            yield from storages_in(each)
