"""Memory plans: from a graph, or the graphs of a forward and its backward, to code in planned memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.execution.observed import fakes_like
from torchard.functional.memory.destinations import with_destinations
from torchard.functional.memory.lifetimes import Buffer, Lifetimes
from torchard.functional.memory.packing import Packing, pack
from torchard.functional.memory.planned_code import PlannedCode, is_poisoned
from torchard.functional.memory.results import with_results_apart
from torchard.functional.memory.reuse import with_reuse
from torchard.functional.memory.tape import CUT, Tape, halves, recorded

__all__ = [
    "HalvesPlan",
    "JointTape",
    "MemoryPlan",
    "joint_tape_of",
    "plan_of",
    "plan_of_halves",
    "plan_of_tape",
    "tape_of",
]


@dataclass(eq=False)
class MemoryPlan:
    """The places of a tape's values in memory.

    Attributes:
        tape: the calls, in destination-passing style.
        packings: the packing of the planned buffers of each device.
        offsets: the offset of each planned buffer, in bytes.
        code: the code of all steps, or of a forward's steps.
    """

    tape: Tape
    lifetimes: Lifetimes
    packings: dict[torch.device, Packing]
    offsets: dict[Buffer, int]
    code: PlannedCode

    @property
    def sizes(self) -> dict[torch.device, int]:
        """The bytes of a block, by device."""
        return {device: packing.size for device, packing in self.packings.items()}


@dataclass(eq=False)
class HalvesPlan(MemoryPlan):
    """The plan of a forward and its backward, in one block.

    Attributes:
        backward: the code of the backward's steps, which reads residuals where the forward left them.
        values: the outputs of the forward that are residuals in the block.
        residuals: for each of these, by its position among them, the input of the backward.
    """

    backward: PlannedCode
    values: list[int]
    residuals: dict[int, int]


@dataclass(eq=False)
class JointTape:
    """The tape of a forward and then its backward.

    Attributes:
        forward, backward: the tapes of both, with the same tensors.
        residuals: the inputs of the backward that are values of the forward.
        count: the number of outputs of the forward that are the caller's.
    """

    tape: Tape
    forward: Tape
    backward: Tape
    residuals: list[torch.Tensor]
    count: int


def tape_of(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], fakes: Any, donated: Sequence[int] = ()
) -> Tape:
    """The tape of a graph for inputs like these, whose values are not read.

    Args:
        fakes: the mode of the tape's tensors.
        donated: the positions of the inputs whose memory the program may take.
    """
    tape = recorded(graph, fakes_like(inputs, fakes), fakes, donated)
    return with_results_apart(tape, fakes)


def joint_tape_of(
    forward: fx.Graph,
    backward: fx.Graph,
    inputs: Sequence[torch.Tensor],
    saved: Sequence[tuple[int, int]],
    count: int,
    fakes: Any,
) -> JointTape:
    """The tape of a forward and its backward for inputs of the forward like these.

    Args:
        saved: for each residual that the backward takes, its list (0 inputs, 1 outputs, 2 values) and its
            index there.
        count: the number of outputs; those of the forward after them are values that are saved.
        fakes: the mode of the tape's tensors.
    """
    first = recorded(forward, fakes_like(inputs, fakes), fakes)
    first = with_results_apart(first, fakes, count)
    lists = first.inputs, first.outputs[:count], first.outputs[count:]
    residuals = [lists[which][i] for which, i in saved]
    floats = [x for x in lists[1] if is_inexact(x)]
    with internals.no_modes(), fakes:
        cotangents = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in floats]
    second = recorded(backward, [*residuals, *cotangents], fakes)
    second = with_results_apart(second, fakes)
    apart = [x for x in lists[2] if not _may_be_left(x, lists[2])]
    tape = halves(first, second, [*lists[1], *apart])
    return JointTape(tape, first, second, residuals, count)


def plan_of(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], name: str, donated: Sequence[int] = ()
) -> MemoryPlan:
    """The plan of a graph for inputs like these.

    Args:
        inputs: their values are not read.
        name: the program's name, for messages.
        donated: the positions of inputs whose memory the program may take.
    """
    fakes = internals.FakeTensorMode()
    return plan_of_tape(tape_of(graph, inputs, fakes, donated), name, fakes, donated)


def plan_of_tape(tape: Tape, name: str, fakes: Any, donated: Sequence[int] = ()) -> MemoryPlan:
    """The plan of a tape."""
    given = [tape.inputs[i] for i in donated]
    tape = with_reuse(with_destinations(tape, given, fakes), given)
    lifetimes, packings, offsets = _packed(tape)
    steps, poison = range(len(tape.steps)), is_poisoned()
    code = PlannedCode(tape, steps, tape.inputs, tape.outputs, lifetimes, offsets, name, poison)
    return MemoryPlan(tape, lifetimes, packings, offsets, code)


def plan_of_halves(joint: JointTape, name: str, fakes: Any) -> HalvesPlan:
    """The plan of a forward and its backward, in one block."""
    tape = with_reuse(with_destinations(joint.tape, (), fakes))
    lifetimes, packings, offsets = _packed(tape)
    cut = next(at for at, step in enumerate(tape.steps) if step.function is CUT)
    first, second, poison = joint.forward, joint.backward, is_poisoned()
    one = PlannedCode(
        tape, range(cut), first.inputs, first.outputs, lifetimes, offsets, f"{name}_forward", poison
    )
    rest = range(cut + 1, len(tape.steps))
    inputs, outputs = second.inputs, second.outputs
    two = PlannedCode(
        tape, rest, inputs, outputs, lifetimes, offsets, f"{name}_backward", poison, one
    )
    saved = range(joint.count, len(first.outputs))
    values = [i for i in saved if id(first.outputs[i]) in one.constants]
    inputs_at = {id(x): i for i, x in enumerate(joint.residuals)}
    places = {k: inputs_at[id(first.outputs[i])] for k, i in enumerate(values)}
    return HalvesPlan(tape, lifetimes, packings, offsets, one, two, values, places)


def _may_be_left(value: torch.Tensor, values: Sequence[torch.Tensor]) -> bool:
    """Whether a value that is saved may stay in a block: those on one device, in plain memory, may."""
    lazy = value.is_conj() or value.is_neg()
    return not lazy and value.device == values[0].device


def _packed(tape: Tape) -> tuple[Lifetimes, dict[torch.device, Packing], dict[Buffer, int]]:
    lifetimes = Lifetimes(tape)
    by_device: dict[torch.device, list[Buffer]] = {}
    for buffer in lifetimes.planned():
        by_device.setdefault(buffer.device, []).append(buffer)
    packings = {
        device: pack([buffer.span for buffer in own]) for device, own in by_device.items()
    }
    offsets = {
        buffer: offset
        for device, own in by_device.items()
        for buffer, offset in zip(own, packings[device].offsets, strict=True)
    }
    return lifetimes, packings, offsets
