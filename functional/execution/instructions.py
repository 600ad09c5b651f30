"""A program as data: one list of instructions, created once from its rolled graph.

Whoever has to know what runs reads this list: the printer (codegen.py), tapes of planned memory,
profiler ranges, and what memory is held until when (storages.py). Values are in *slots*, which have the
names of variables. A slot holds a value from the instruction that sets it to the `Drop` that empties it,
right after the value's last read: what is held at any point can be read off.

A loop over layers' stacked weights, printed::

    v2 = v1                        Assign    the carry enters
    kv5 = [None] * 4               New       a value that the backward reads, of each iteration
    for i in range(0, 4, 1):       For
        v4 = v0[i]                 Read      the layer's weights
        v5 = f(v2, v4)             Compute
        del v4                     Drop
        kv5[i] = v5                Put
        v2 = v5                    Assign    to the next iteration
        del v5                     Drop
    v6 = v2                        Assign    the carry leaves
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from torchard.functional.programs.labels import Label, label_of

__all__ = [
    "Assign",
    "Compute",
    "Copied",
    "Drop",
    "For",
    "Get",
    "Inputs",
    "Instruction",
    "New",
    "Pack",
    "Put",
    "Read",
    "Return",
    "Shifted",
    "SlotNames",
    "When",
    "While",
    "Write",
    "executed",
]

SlotNames = Mapping[fx.Node, str]


class Instruction:
    """One thing that a program does."""

    __slots__ = ()

    @property
    def label(self) -> Label | None:
        """That of the operation whose errors it may raise."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _OfNode(Instruction):
    node: fx.Node | None

    @property
    def label(self) -> Label | None:
        return None if self.node is None else label_of(self.node)


@dataclass(frozen=True, slots=True, eq=False)
class Inputs(Instruction):
    """Set slots to the program's inputs, which a list of them holds no longer."""

    slots: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class Compute(_OfNode):
    """Compute a node's function.

    Attributes:
        slot: the slot of the result.
        slots: the slots of the operands, by node.
        given: the slot of the list that is the only operand, if the call takes over the list.
        placed: of a call that takes over its operands, which results to put in which operands' memory:
            pairs of positions, (operand, result).
    """

    node: fx.Node
    slot: str
    slots: SlotNames
    given: str = ""
    placed: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Copied(Compute):
    """Compute a node that writes its second operand to a part of its first: in a copy."""


@dataclass(frozen=True, slots=True, eq=False)
class Write(_OfNode):
    """Compute a node's function in the memory of its first operand, which nothing reads afterwards.

    Attributes:
        slot, slots: as those of `Compute`.
        write: the operator that writes: to the first operand, or the second operand to a part of it.
        part: the view that is this part; None if the operator takes the node's own arguments.
    """

    node: fx.Node
    slot: str
    slots: SlotNames
    write: Any
    part: Any = None

    @property
    def base(self) -> str:
        """The slot of the memory that is written to."""
        base = self.node.args[0]
        assert isinstance(base, fx.Node)
        return self.slots[base]


@dataclass(frozen=True, slots=True, eq=False)
class Pack(_OfNode):
    """Put values in a list of their own.

    Attributes:
        node: the node whose value is the list; None for the operand of a call.
    """

    slot: str
    values: Sequence[fx.Node]
    slots: SlotNames


@dataclass(frozen=True, slots=True, eq=False)
class Read(_OfNode):
    """Read one of the values in a slot.

    Attributes:
        node: the node whose value this is; None for a value that an earlier iteration computed.
        source: the slot of a stack of rows, of a list, or of a tuple.
        index: the value's index; None for the number of the iteration.
        how: read a row of a stack, read an item that stays in the list, or take it out of the list.
    """

    slot: str
    source: str
    index: Any
    how: Literal["row", "item", "out"]


@dataclass(frozen=True, slots=True, eq=False)
class New(Instruction):
    """Create a collector of iterations' values: a list of ``count`` items, a stack of rows, or a sum."""

    slot: str
    kind: Literal["list", "rows", "total"]
    count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Put(_OfNode):
    """Add the value of an iteration to a list, a stack of rows, or a sum.

    Attributes:
        node: the node that reads the collected values, if errors should name its line.
        slot: the slot of the list, stack or sum.
        source: the slot of the value; None empties the place in a list.
        listed: whether the slot holds a list.
        only: the rows that are added; all if empty.
    """

    slot: str
    source: str | None
    listed: bool = True
    only: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Get(_OfNode):
    """Set a slot to the rows or the sum that another slot collected."""

    node: fx.Node
    slot: str
    source: str


@dataclass(frozen=True, slots=True, eq=False)
class Assign(_OfNode):
    """Set slots to the values of other slots, all at once.

    Attributes:
        node: the node whose value this is, if it is a node's.
    """

    slots: Sequence[str]
    sources: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class Drop(Instruction):
    """Empty slots."""

    slots: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class For(Instruction):
    """Run a body for each row, in this order."""

    order: range
    body: Sequence[Instruction]


@dataclass(frozen=True, slots=True, eq=False)
class While(Instruction):
    """Run a body as long as the value in a slot is true. Rows are the numbers of iterations."""

    slot: str
    body: Sequence[Instruction]


@dataclass(frozen=True, slots=True, eq=False)
class When(Instruction):
    """Run a body if the row is within these."""

    rows: range
    body: Sequence[Instruction]


@dataclass(frozen=True, slots=True, eq=False)
class Shifted(Instruction):
    """Run a body for the row so many further on."""

    by: int
    body: Sequence[Instruction]


@dataclass(frozen=True, slots=True, eq=False)
class Return(Instruction):
    """Return values, and what is none as it is.

    Attributes:
        alone: the positions of values that, if they are views, are returned without the tensors that
            they are views of: only so does their memory have one owner, and can be donated again.
    """

    values: Sequence[object]
    slots: SlotNames
    alone: Sequence[int] = ()


def executed(
    instructions: Sequence[Instruction], i: int | None = None
) -> Iterator[tuple[Instruction, Any]]:
    """The instructions in the order in which they run, each with the row of its iteration, if any."""
    for each in instructions:
        match each:
            case For(order, body):
                for row in order:
                    yield from executed(body, row)
            case While(_, body):  # one iteration stands for all
                yield from executed(body, 0)
            case When(rows, body):
                if i in rows:
                    yield from executed(body, i)
            case Shifted(by, body) if i is not None:
                yield from executed(body, i + by)
            case _:
                yield each, i
