"""Liveness: the memory that a program holds at each operation.

The list of what runs (execution/instructions.py) says which slot holds what until when, so it is run with
storages in the place of tensors: an operation allocates its results, a view refers to its operand's
storage, and a storage is alive as long as a slot, a list or a tuple refers to it. Arguments are the
caller's, and so are held throughout unless they are donated. Each storage is counted once, that of a
running sum too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
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
    executed,
)
from torchard.functional.execution.sequencing import instructions_of
from torchard.functional.programs.graphs import bytes_of
from torchard.functional.programs.loops import loops_together, regrouped
from torchard.functional.programs.markers import total
from torchard.functional.programs.program import Program
from torchard.functional.programs.running_sums import added_product, sum_so_far
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import base_of, handed_value, storage_of
from torchard.functional.remat.loop_residuals import with_loop_residuals
from torchard.functional.remat.split import halves_of

__all__ = [
    "Allocation",
    "Liveness",
    "Storage",
    "bytes_in",
    "donated_inputs",
    "liveness",
    "order_of",
    "peak_of",
    "storage_key",
]


class Storage(NamedTuple):
    """The storages that a node allocates for one of its results, in all iterations."""

    node: fx.Node
    item: int = 0


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage.

    Attributes:
        node, item: whose result it is first.
        nbytes: its size.
        begin, end: the first and the last of the events at which it is alive; inputs begin at -1.
    """

    node: fx.Node
    item: int
    nbytes: int
    begin: int
    end: int = -1
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
        return max(self.held())


def order_of(program: Program) -> list[fx.Node]:
    """The operations of a program in execution order; of a joint program, forward then backward.

    Those of a loop are together.
    """
    if any(leaf.role == "cotangent" for leaf in program.inputs):
        forward, backward = halves_of(program)
        both = [*loops_together(forward), *loops_together(backward)]
        return list(dict.fromkeys(both))  # a backward takes views again that its forward took
    return [node for node in regrouped(program.graph) if node.op == "call_function"]


def liveness(program: Program) -> Liveness:
    """The liveness of a program; of a joint program, that of its forward followed by its backward.

    Over a mesh, sizes are those on the rank that holds most; buffers of collectives are not counted.
    """
    if any(leaf.role == "cotangent" for leaf in program.inputs):
        program = with_loop_residuals(program)
    run = _Run(program)
    order = [*program.placeholders, *order_of(program), program.graph.output_node()]
    for instruction, i in executed(instructions_of(order)):
        run.one(instruction, i)
    for allocation in run.live.allocations:
        if allocation.references:
            allocation.end = len(run.live.order)
    return run.live


class _Group:
    """What is in a tuple or list, each as long as that is referred to."""

    __slots__ = ("items", "references")

    def __init__(self, items: list[Any]) -> None:
        self.items, self.references = items, 0
        for each in items:
            if each is not None:
                each.references += 1


class _Collected(_Group):
    """The rows or the sum of a loop's values: a sum begins in the first value's memory."""

    __slots__ = ("of_own",)

    def __init__(self) -> None:
        super().__init__([])
        self.of_own = False


class _Run:
    """Runs instructions with storages in the place of tensors."""

    def __init__(self, program: Program) -> None:
        self.program, self.size, self.live = program, bytes_in(program), Liveness()
        self.merged = _added_products(program.calls)
        self.slots: dict[str, Any] = {}

    def one(self, instruction: Instruction, i: Any) -> None:
        """Run an instruction, in the iteration of row i."""
        slots = self.slots
        match instruction:
            case Compute(node, slot, of):
                self._set(slot, self._computed(node, of))
            case Drop(gone):
                for slot in gone:
                    self._release(slots.pop(slot))
            case Inputs(names):
                self._inputs(names)
            case Pack(_, slot, values, of):
                self._set(slot, _Group([slots[of[value]] for value in values]))
            case Read(_, slot, source, index, how):
                index = i if index is None else index
                self._set(slot, slots[source] if how == "row" else slots[source].items[index])
                if how == "out":
                    self._replace(slots[source], index, None)
            case New(slot, kind, count):
                self._set(slot, _Group([None] * count) if kind == "list" else _Collected())
            case Put(node, slot, source, listed, only):
                value = None if source is None else slots[source]
                if not listed:
                    self._collect(node, slots[slot], value)
                elif not only or i in only:
                    self._replace(slots[slot], i, value)
            case Get(_, slot, source):
                self._set(slot, slots[source].items[0])
            case Assign(_, names, sources):
                for slot, value in zip(names, [slots[source] for source in sources], strict=True):
                    self._set(slot, value)
            case Return(values, of):
                for value in values:
                    if isinstance(value, fx.Node):
                        slots[of[value]].references += 1

    def _inputs(self, names: Sequence[str]) -> None:
        donated = set(donated_inputs(self.program))
        for number, (node, slot) in enumerate(zip(self.program.placeholders, names, strict=True)):
            storage = self._allocated(node, 0, self.size(node, 0), -1)
            storage.references += number not in donated
            self._set(slot, storage)

    # -- storages -----------------------------------------------------------------------------------

    def _computed(self, node: fx.Node, slots: Mapping[fx.Node, str]) -> Any:
        """What an operation returns."""
        val: Any = VAL.get(node)
        at = len(self.live.order)
        self.live.order.append(node)
        several = isinstance(val, (tuple, list))
        source = sum_so_far(node) or base_of(node)
        if source is not None:
            value = self.slots[slots[source]]
            return _Group([value] * len(val)) if several else value
        if not several:
            return self._allocated(node, 0, 0 if node in self.merged else self.size(node, 0), at)
        return _Group(
            [
                self._allocated(node, k, self.size(node, k), at) if isinstance(x, torch.Tensor) else None
                for k, x in enumerate(val)
            ]
        )

    def _allocated(self, node: fx.Node, item: int, nbytes: int, at: int) -> Allocation:
        allocation = Allocation(node, item, nbytes, at)
        self.live.allocations.append(allocation)
        return allocation

    def _collect(self, reader: fx.Node | None, into: _Collected, value: Any) -> None:
        """Add a value: rows are in a buffer, and a sum is from its second term on."""
        assert reader is not None
        if reader.target is total and not into.items:
            into.items.append(None)
            self._replace(into, 0, value)
        elif not into.of_own:
            into.of_own = True
            at = len(self.live.order)
            self.live.order.append(reader)
            into.items = into.items or [None]
            self._replace(into, 0, self._allocated(reader, 0, self.size(reader, 0), at))

    def _set(self, slot: str, value: Any) -> None:
        if value is not None:
            value.references += 1
        self._release(self.slots.get(slot))
        self.slots[slot] = value

    def _replace(self, group: _Group, index: int, value: Any) -> None:
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


def peak_of(program: Program) -> int:
    """The most bytes that are alive at once; of a pipeline, on the stage that holds most."""
    if program.runtime is None:
        return liveness(program).peak
    views = program.runtime.stages(program)
    return max(liveness(replace(program, runtime=view)).peak for view in views)


def storage_key(node: fx.Node) -> Storage:
    """The storage of a value; in a loop, in any iteration."""
    root = handed_value(storage_of(node))
    while (before := sum_so_far(root)) is not None:
        root = storage_of(before)
    if root.target is operator.getitem:
        whole, item = root.args
        assert isinstance(whole, fx.Node) and isinstance(item, int)
        return Storage(whole, item)
    return Storage(root)


def _added_products(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Products that are computed into a running sum."""
    found = (added_product(node) for node in nodes if sum_so_far(node) is not None)
    return {product for product in found if product is not None}


def donated_inputs(program: Program) -> list[int]:
    """The inputs that are donated; none in a joint program, whose backward may read them."""
    if any(leaf.role == "cotangent" for leaf in program.inputs) or program.compiler is None:
        return []
    starts = tuple(f"args[{n}]" for n in program.compiler.donate_argnums)
    return [i for i, leaf in enumerate(program.inputs) if leaf.path.startswith(starts)]


def bytes_in(program: Program) -> Callable[[fx.Node, int], int]:
    """A function for the bytes of a result of a node, by the program's runtime."""
    return bytes_of if program.runtime is None else program.runtime.bytes_of
