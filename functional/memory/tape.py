"""Tapes: the calls that a program makes, in order, recorded on fake tensors.

Loops are run, so a tape has the calls of every iteration in the order in which they happen. Values are
fake tensors, identified by object, and views share the storage of what they are views of: aliasing is
recorded, not derived.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.effects.in_place import WRITTEN_VIEWS
from torchard.functional.execution.instructions import (
    Assign,
    Compute,
    Copied,
    Drop,
    Get,
    Inputs,
    Instruction,
    New,
    Pack,
    Put,
    Read,
    Return,
    SlotNames,
    Write,
    executed,
)
from torchard.functional.execution.sequencing import what_runs
from torchard.functional.iterations.collecting import Rows, Total, copied, taken
from torchard.functional.programs.labels import Label
from torchard.functional.torch_internals.operators import aten, c10d
from torchard.functional.updates.in_place import UpdateInPlace

__all__ = [
    "CUT",
    "Recorder",
    "Step",
    "Tape",
    "Unplannable",
    "halves",
    "part_of",
    "recorded",
    "tensors_in",
]


@dataclass(eq=False, slots=True)
class Step:
    """A call.

    Attributes:
        function: an operator, a kernel or a Python function.
        args, kwargs: the arguments, with fake tensors.
        results: the tensors that the call returns; None in place of other values.
        several: whether the call returns a tuple.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor | None, ...]
    several: bool
    label: Label

    @property
    def operands(self) -> list[torch.Tensor]:
        """The tensors among its arguments."""
        return tensors_in((self.args, self.kwargs))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among its results."""
        return [result for result in self.results if result is not None]


@dataclass(eq=False)
class Tape:
    """The calls from some inputs to some outputs, which are fake tensors."""

    inputs: list[torch.Tensor]
    steps: list[Step] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


def part_of(
    base: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor in the memory of another one, from an offset in elements on."""
    return base.as_strided(shape, stride, base.storage_offset() + offset)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    return [leaf for leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor)]


class Unplannable(Exception):
    """A call that no tape can have."""


class Recorder:
    """Runs functions on fake tensors, and records the calls as steps."""

    def __init__(self, fakes: Any, steps: list[Step]) -> None:
        self.fakes, self.steps = fakes, steps
        self.known = internals.KnownResults(fakes)

    def call(self, function: Any, label: Label, *args: Any, **kwargs: Any) -> Any:
        """Compute a function, and record that."""
        if function is c10d.wait_tensor.default:  # torch's fakes of it are new tensors
            value: Any = args[0]
        elif isinstance(function, UpdateInPlace):
            value = tuple(args[0])
        else:
            with self.fakes:
                value = self._result(function, args, kwargs)
        several = isinstance(value, (tuple, list))
        items = value if several else [value]
        if any(isinstance(item, (tuple, list)) for item in items):
            raise Unplannable(f"{label.op} returns a list within a tuple")
        results = tuple(item if isinstance(item, torch.Tensor) else None for item in items)
        self.steps.append(Step(function, args, kwargs, results, several, label))
        return value

    def _result(self, function: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(function, internals.OpOverload):
            return function(*args, **kwargs)
        return self.known.run(function, args, kwargs, lambda op, *given, **named: op(*given, **named))[0]

    def row_of(self, stacked: torch.Tensor, i: int) -> torch.Tensor:
        """A row of stacked values."""
        row: torch.Tensor = self.call(aten.select.int, self.here, stacked, 0, i)
        return row

    def without_base(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor that is no view for autograd."""
        if not internals.is_view(value):
            return value
        with self.fakes:
            alone = part_of(value, value.shape, value.stride(), 0)
        self.steps.append(Step(internals.without_base, (value,), {}, (alone,), False, self.here))
        return alone

    @property
    def here(self) -> Label:
        """The label of the last call."""
        return self.steps[-1].label if self.steps else NOWHERE

    def write(self, function: Any, label: Label, *args: Any, **kwargs: Any) -> None:
        """Record the call of a function that writes to an argument, which is all it does."""
        self.steps.append(Step(function, args, kwargs, (), False, label))


NOWHERE = Label("select.int", "", "", "", "", None, "", "", "")


class _RecordedRows(Rows):
    """Rows of iterations, whose calls are recorded."""

    __slots__ = ("recorder",)

    def __init__(self, recorder: Recorder, count: int) -> None:
        super().__init__(count)
        self.recorder = recorder

    def put(self, i: int, value: torch.Tensor) -> None:
        call, label = self.recorder.call, self.recorder.here
        if self.buffer is None:
            self.buffer = call(aten.new_empty.default, label, value, [self.count, *value.shape])
        call(aten.copy_.default, label, call(aten.select.int, label, self.buffer, 0, i), value)
        self.written.add(i)


class _RecordedTotal(Total):
    """The sum of the values of iterations, whose calls are recorded."""

    __slots__ = ("recorder",)

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def put(self, i: int, value: torch.Tensor) -> None:
        if self.total is None:
            self.total = value
            return
        add = aten.add_.Tensor if self.written else aten.add.Tensor
        self.total = self.recorder.call(add, self.recorder.here, self.total, value)
        self.written = True


def recorded(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], fakes: Any, donated: Sequence[int] = ()
) -> Tape:
    """The calls of what a graph runs.

    Args:
        inputs: fake tensors.
        fakes: the mode that they belong to.
        donated: the positions of those that may be written to.
    """
    tape = Tape(list(inputs))
    with internals.no_modes(), torch.no_grad():
        run = _Run(Recorder(fakes, tape.steps), tape.inputs)
        for instruction, i in executed(what_runs(graph, donated)[1].instructions):
            run.one(instruction, i)
    tape.outputs = run.outputs
    return tape


class _Run:
    """Does what instructions say, on fake tensors."""

    def __init__(self, recorder: Recorder, inputs: Sequence[torch.Tensor]) -> None:
        self.recorder, self.inputs = recorder, inputs
        self.held: dict[str, Any] = {}  # by slot
        self.outputs: list[Any] = []

    def one(self, instruction: Instruction, i: int | None) -> None:
        """Run an instruction, in the iteration of row i."""
        held = self.held
        match instruction:
            case Inputs(slots):
                held.update(zip(slots, self.inputs, strict=True))
            case Copied(node, slot, slots):
                held[slot] = self._copied(instruction, i)
            case Compute(node, slot, slots, given):
                args = (held[given],) if given else self._values(node.args, slots)
                label = instruction.label
                assert label is not None
                held[slot] = self.recorder.call(
                    node.target, label.in_iteration(i), *args, **self._values(node.kwargs, slots)
                )
            case Write(_, slot, slots):
                self._write(instruction, i)
                held[slot] = held[instruction.base]
            case Pack(_, slot, values, slots):
                held[slot] = self._values(list(values), slots)
            case Read(_, slot, source, index, how):
                read: Any = {"row": self.recorder.row_of, "out": taken, "item": operator.getitem}[how]
                held[slot] = read(held[source], i if index is None else index)
            case New(slot, kind, count):
                held[slot] = self._new(kind, count)
            case Put(_, slot, source, listed, only):
                self._put(held[slot], None if source is None else held[source], i, listed, only)
            case Get(_, slot, source):
                held[slot] = held[source].get()
            case Assign(_, slots, sources):
                held.update(zip(slots, [held[source] for source in sources], strict=True))
            case Drop(slots):
                for slot in slots:
                    del held[slot]
            case Return(values, slots, alone):
                self.outputs = self._values(list(values), slots)
                for at in alone:
                    self.outputs[at] = self.recorder.without_base(self.outputs[at])

    def _copied(self, instruction: Copied, i: int | None) -> torch.Tensor:
        """A copy of the first operand, to a part of which the second is written."""
        node, slots, label = instruction.node, instruction.slots, instruction.label
        assert label is not None
        label = label.in_iteration(i)
        args, kwargs = self._values((node.args, node.kwargs), slots)
        base, source, *place = args
        with self.recorder.fakes:
            like = copied(base)
        copy: torch.Tensor = self.recorder.call(
            aten.new_empty_strided.default, label, base, like.shape, like.stride()
        )
        self.recorder.write(aten.copy_.default, label, copy, base)
        part = self.recorder.call(WRITTEN_VIEWS[node.target], label, copy, *place, **kwargs)
        self.recorder.write(aten.copy_.default, label, part, source)
        return copy

    def _write(self, instruction: Write, i: int | None) -> None:
        label = instruction.label
        assert label is not None
        label = label.in_iteration(i)
        args, kwargs = self._values((instruction.node.args, instruction.node.kwargs), instruction.slots)
        if instruction.part is not None:
            base, source, *at = args
            part = self.recorder.call(instruction.part, label, base, *at, **kwargs)
            args, kwargs = (part, source), {}
        self.recorder.write(instruction.write, label, *args, **kwargs)

    def _new(self, kind: str, count: int) -> Any:
        if kind == "list":
            return [None] * count
        return _RecordedRows(self.recorder, count) if kind == "rows" else _RecordedTotal(self.recorder)

    def _put(self, into: Any, value: Any, i: Any, listed: bool, only: Sequence[int]) -> None:
        if only and i not in only:
            return
        if listed:
            into[i] = value
        else:
            into.put(i, value)

    def _values(self, value: Any, slots: SlotNames) -> Any:
        """Arguments with what is held in the place of nodes."""
        if isinstance(value, fx.Node):
            return self.held[slots[value]]
        if isinstance(value, (list, tuple)):
            items = [self._values(x, slots) for x in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._values(x, slots) for key, x in value.items()}
        return value


def halves(forward: Tape, backward: Tape, outputs: Sequence[Any]) -> Tape:
    """The tape of a forward and then its backward, whose inputs are values of the forward, or cotangents.

    Args:
        outputs: the forward's outputs that the caller receives.
    """
    known = {id(x) for x in (*forward.inputs, *forward.outputs)}
    cotangents = [x for x in backward.inputs if id(x) not in known]
    cut = Step(CUT, (), {}, (), False, NOWHERE)
    return Tape(
        [*forward.inputs, *cotangents],
        [*forward.steps, cut, *backward.steps],
        [*outputs, *backward.outputs],
    )


def CUT() -> None:
    """Stands between the steps of a forward and of its backward."""
