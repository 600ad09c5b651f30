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
scattered, back to where it lies in ``y``. So is ``y[i] += x``, whose sum is scattered back. The value of
such a part may be read for as long as nothing else is written to ``y``.

Rows of a stack that are written, and stacked again, stay where they are. The code of a compiled region is
given such rows to write to. Whether it does is its own business: it puts what it returns there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional.effects.in_place import (
    SCATTERS,
    WRITTEN_VIEWS,
    in_place_variant,
    is_pointwise,
)
from torchard.functional.execution.instructions import (
    Assign,
    Compute,
    Copied,
    For,
    Get,
    Instruction,
    New,
    Put,
    Read,
    Return,
    Shifted,
    SlotNames,
    When,
    While,
    Write,
)
from torchard.functional.execution.reads import (
    HalfOf,
    MemoryPart,
    MemoryReads,
    WriteUse,
    storages_in,
    writes_of_call,
)
from torchard.functional.programs.markers import row, rows
from torchard.functional.programs.tags import LOOP, SHAPE, VAL
from torchard.functional.programs.views import is_view
from torchard.functional.torch_internals.operators import aten

__all__ = ["Reinplaced", "reinplaced", "written_base"]

# Copies that are not made: the value lies in the operand.
_COPIES = (aten.clone.default,)

# Scatters whose results may be larger than the base.
_BROADCAST = (
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_scatter.default,
)


class Reinplaced(NamedTuple):
    """Instructions with writes.

    Attributes:
        nodes: those that write to their base, in order, each with whether its value already lies there.
        taken: the positions of the inputs that are written to.
        writes: whether anything is written, a copy included.
    """

    instructions: Sequence[Instruction]
    nodes: Mapping[fx.Node, bool] = {}
    taken: Sequence[int] = ()
    writes: bool = False


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
    calls = [each.node for each in _within(instructions) if isinstance(each, Compute)]
    computed = [node for call in calls for node in (call, *(writes_of_call(call) or ()))]
    copying = [node for node in computed if written_base(node) is not None]
    if not copying:
        return Reinplaced(instructions)
    put_back = {inner: outer for outer in copying if (inner := _put_back(outer)) is not None}
    candidates = [node for node in computed if node in put_back or written_base(node) is not None]
    reads = MemoryReads(inputs, donated, half_of, candidates)
    reads.all(instructions)
    nodes = _which_write(candidates, put_back, reads)
    stacks = _written_stacks(nodes, reads)
    nodes = {n: lies for n, lies in nodes.items() if n.target is not getitem or _is_stacked(n, stacks)}
    rewriting = _Rewriting(nodes, stacks, reads.alone() if donated else [])
    changed = rewriting.program(instructions)
    written = reads.written(nodes)
    taken = [i for i in donated if reads.arguments[i] in written]
    writes = bool(nodes) or any(isinstance(each, Copied) for each in _within(changed))
    return Reinplaced(changed, {**nodes, **dict.fromkeys(stacks, True)}, taken, writes)


def _which_write(
    candidates: Sequence[fx.Node], put_back: Mapping[fx.Node, fx.Node], reads: MemoryReads
) -> dict[fx.Node, bool]:
    """The candidates that write, each with whether its value already lies in its base.

    Args:
        put_back: by write to a part, the write that puts its result back to where the part lies.
    """
    found: dict[fx.Node, bool] = {}
    for node in reversed(candidates):
        inside, outer = {node}, put_back.get(node)
        while outer is not None and outer in found:  # which only put the result back to where it lies
            inside.add(outer)
            outer = put_back.get(outer)
        in_time = len(node.users) < 2 or node not in put_back or reads.is_read_in_time(node, inside)
        if in_time and all(_may_write(node, use, inside, reads) for use in reads.uses[node]):
            found[node] = node.target in _COPIES
    found.update((outer, True) for inner, outer in put_back.items() if inner in found)
    return {node: found[node] for node in candidates if node in found}


def _may_write(node: fx.Node, use: WriteUse, inside: Collection[fx.Node], reads: MemoryReads) -> bool:
    storages = list(storages_in(use.base))
    if len(storages) != 1 or (use.shared and not _reads_another_part(node)):
        return False
    known = reads.known[storages[0]]
    alike = not isinstance(use.base, MemoryPart) and _strides_are_those_of(node, known.dense)
    # By nothing but the rest of this write, once: not by the same write of a later iteration.
    later = [reader for _, reader in reads.after(storages[0], use.at)]
    dead = set(later) <= {*inside} - {node} and len(set(later)) == len(later)
    same_half = known.half == reads.half_of(node)
    return known.owned and dead and same_half and (alike or len(inside) > 1)


def _strides_are_those_of(node: fx.Node, dense: bool) -> bool:
    """Whether an operation's result has the strides of its base, which may have no gaps.

    On a rank, where strides are not known, reshapes copy where they must.
    """
    have, base = VAL.get(node), VAL.get(node.all_input_nodes[0])
    if have is None or base is None:
        return dense or node.target in WRITTEN_VIEWS
    return bool(have.stride() == base.stride())


def _written_stacks(nodes: Mapping[fx.Node, bool], reads: MemoryReads) -> dict[fx.Node, fx.Node]:
    """By reader of a loop's stacked values: the stack in whose rows the values were written."""
    written = reads.written(nodes)
    found: dict[fx.Node, fx.Node] = {}
    for reader in (each for each in reads.collected if each.target is rows):
        value: Any
        value, count, *others = reader.args
        source = value
        while source in nodes:
            source = written_base(source)
        if source is value or source.target is not row or others:
            continue
        loop, (stack,) = LOOP.of(source), source.all_input_nodes
        # A value of a later loop that reads rows of this one is written when the stack may be gone.
        here = LOOP.of(value) is loop and (loop.first, loop.count) == (0, count)
        alone = here and stack not in found.values()
        if alone and reads.may_lie_in_rows(reader, loop, written):
            found[reader] = stack
    return found


def written_base(node: fx.Node) -> fx.Node | None:
    """The operand that an operation copies, and writes to."""
    copies = node.target in _COPIES and not node.kwargs
    known = copies or node.target in WRITTEN_VIEWS or node.target in SCATTERS
    base = node.args[0] if known and node.args else _base_in_call(node)
    if not isinstance(base, fx.Node) or (node.target in _BROADCAST and _shape(node) != _shape(base)):
        return None
    return base


def _base_in_call(item: fx.Node) -> fx.Node | None:
    """The operand of which a result of a call is a copy in which some elements are written."""
    if item.target is not getitem:
        return None
    (call,) = item.all_input_nodes
    position = (writes_of_call(call) or {}).get(item)
    given: Any = call.args[0]
    return None if position is None else given[position]


def _is_stacked(node: fx.Node, stacks: Iterable[fx.Node]) -> bool:
    """Whether a value is stacked where it lies, after further writes or none."""
    values = [reader.all_input_nodes[0] for reader in stacks]
    return any(node in _with_bases(value) for value in values)


def _with_bases(value: fx.Node) -> Iterator[fx.Node]:
    base: fx.Node | None = value
    while base is not None:
        yield base
        base = written_base(base)


def _shape(node: fx.Node) -> Any:
    value = VAL.get(node)
    return SHAPE.get(node, node) if value is None else value.shape


def _put_back(outer: fx.Node) -> fx.Node | None:
    """The write to a part of a base whose result this node scatters back to where the part lies."""
    part_of = WRITTEN_VIEWS.get(outer.target)
    inner = outer.args[1] if part_of is not None else None
    if not isinstance(inner, fx.Node) or LOOP.get(inner) is not LOOP.get(outer):
        return None
    part = written_base(inner) or _updated(inner)
    if part is None or part.target is not part_of or LOOP.get(part) is not LOOP.get(outer):
        return None
    there = (outer.args[0], *outer.args[2:]), outer.kwargs
    return inner if (tuple(part.args), part.kwargs) == there else None


def _updated(node: fx.Node) -> fx.Node | None:
    """The operand of which each element is replaced by one that is computed from it."""
    base, have = node.args[0] if node.args else None, VAL.get(node)
    if not isinstance(base, fx.Node) or not is_pointwise(node.target):
        return None
    # Kernels for complex64 round otherwise in place (torch 2.13).
    exact = have is None or (have.dtype == VAL.of(base).dtype and have.dtype != torch.complex64)
    return base if exact and in_place_variant(node.target) is not None else None


def _reads_another_part(node: fx.Node) -> bool:
    """Whether a write copies from a part of its base to another, as ``y[0] = y[1]`` does."""
    base, part, *_ = (*node.args, None)
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


# -- instructions ----------------------------------------------------------------------------------


class _Rewriting:
    """Replaces instructions.

    Args:
        nodes: the operations that write, each with whether its value already lies in its base.
        stacks: by reader of stacked values, the stack in which they lie.
        alone: the positions of the results that own their memory.
    """

    def __init__(
        self,
        nodes: Mapping[fx.Node, bool],
        stacks: Mapping[fx.Node, fx.Node],
        alone: Sequence[int],
    ) -> None:
        self.nodes, self.stacks, self.alone = nodes, stacks, alone
        self.collectors: dict[str, str] = {}  # the slots of stacks, by those of their readers' rows

    def program(self, instructions: Sequence[Instruction]) -> list[Instruction]:
        """A program's instructions with what replaces them."""
        if self.stacks:
            self._find_collectors(instructions)
        return self.all(instructions)

    def all(self, instructions: Sequence[Instruction]) -> list[Instruction]:
        """Those of a program or a body."""
        return [new for each in instructions for new in self._one(each)]

    def _find_collectors(self, instructions: Sequence[Instruction]) -> None:
        bodies = list(_within(instructions))
        slots = {
            each.node.all_input_nodes[0]: each.source
            for each in bodies
            if isinstance(each, Read) and each.node is not None and each.how == "row"
        }
        for each in bodies:
            stack = self.stacks.get(each.node) if isinstance(each, Put) and each.node else None
            if isinstance(each, Put) and stack is not None and not each.listed:
                self.collectors[each.slot] = slots[stack]

    def _one(self, each: Instruction) -> Iterator[Instruction]:
        match each:
            case For() | When() | While() | Shifted():
                yield replace(each, body=self.all(each.body))
            case Return():
                yield replace(each, alone=self.alone)
            case New(slot) if slot in self.collectors:
                yield Assign(None, [slot], [self.collectors[slot]])
            case Put(_, slot) if slot in self.collectors:
                pass
            case Get(node, slot, source) if source in self.collectors:
                yield Assign(node, [slot], [source])
            case Compute(node, slot, slots) if node in self.nodes:
                yield self._write(node, slot, slots)
            case Compute(node, slot, slots) if node.target in WRITTEN_VIEWS:
                yield Copied(node, slot, slots)
            case Compute(node) if any(n in self.nodes for n in writes_of_call(node) or ()):
                results = (writes_of_call(node) or {}).items()
                placed = [(at, int(str(n.args[1]))) for n, at in results if n in self.nodes]
                yield replace(each, placed=placed)
            case _:
                yield each

    def _write(self, node: fx.Node, slot: str, slots: SlotNames) -> Instruction:
        part = WRITTEN_VIEWS.get(node.target)
        write = aten.copy_.default if part is not None else in_place_variant(node.target)
        written = Write(node, slot, slots, write, part)
        return Assign(node, [slot], [written.base]) if self.nodes[node] else written


def _within(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """All instructions, those of bodies included."""
    for each in instructions:
        yield each
        if isinstance(each, (For, When, While, Shifted)):
            yield from _within(each.body)
