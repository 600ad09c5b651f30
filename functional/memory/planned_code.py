"""Code of a tape whose buffers have places: straight-line Python on tensors in a block.

A tensor in a block is the same in every call, and so is a view of it: both are constants of the code,
made when it is bound to a block. What is left to run is the operations, each of which writes where its
result belongs. What is not in a block (inputs, results, what an operation allocates itself) is a
variable, which is dropped after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.execution.codegen import Line, assembled, text_of
from torchard.functional.memory.lifetimes import Buffer, Lifetimes
from torchard.functional.memory.tape import Step, Tape, part_of
from torchard.functional.programs.calls import callee
from torchard.functional.torch_internals.operators import COLLECTIVES

__all__ = ["PlannedCode", "is_poisoned", "poisoned"]


@dataclass(eq=False)
class PlannedCode:
    """The code of some steps of a tape, before it is bound to a block.

    Args:
        steps: the numbers of these steps on the tape.
        inputs, outputs: the values that the code takes and returns.
        offsets: the offset of each planned buffer, in bytes.
        before: the code of the steps before these, whose values in the block may be read.
        poisoned: whether memory is overwritten before its first and after its last use, with bytes that
            are NaN in every floating dtype, so that a value that is read too late cannot be missed.
    """

    tape: Tape
    steps: range
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[Any]
    lifetimes: Lifetimes
    offsets: Mapping[Buffer, int]
    name: str
    poisoned: bool = False
    before: PlannedCode | None = None
    names: dict[str, Any] = field(default_factory=dict)
    body: list[Line] = field(default_factory=list)
    # Names of values, by the object that stands for them in the tape.
    constants: dict[int, str] = field(default_factory=dict)
    variables: dict[int, str] = field(default_factory=dict)
    # The steps whose results are constants, in order.
    views: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.before is not None:
            self.constants.update(self.before.constants)
            self.views += self.before.views
        self.last = self._last_reads()
        self.body += self._lines()

    def bound(
        self, block: Mapping[torch.device, torch.Tensor]
    ) -> Callable[..., list[torch.Tensor]]:
        """The function on tensors in a block, which may empty a list of inputs that it is given.

        Args:
            block: the bytes of each device, as a tensor.
        """
        names = dict(self.names)
        with internals.no_modes(), torch.no_grad(), torch.inference_mode(False):
            values = self._constants(block)
        names.update({self.constants[key]: value for key, value in values.items()})
        if self.poisoned:
            names["poison"] = _Poison(
                (buffer.end, block[buffer.device][start : start + buffer.nbytes])
                for buffer, start in self.offsets.items()
            )
            for memory in () if self.before else block.values():
                memory.fill_(_POISON)
        return assembled(self.body, names, self.name)

    # -- constants ----------------------------------------------------------------------------------

    def _constants(self, block: Mapping[torch.device, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The tensors in a block, by the object that stands for each in the tape."""
        values: dict[int, torch.Tensor] = {}
        inside: set[int] = set()  # the storages of what was placed
        for step in self.views:
            if self._is_allocation(step):
                (allocated,) = step.tensors
                values[id(allocated)] = self._placed(allocated, block[allocated.device])
                inside.add(internals.storage_id(values[id(allocated)]))
                continue
            args, kwargs = tree.map(lambda x: values.get(id(x), x), (step.args, step.kwargs))
            made = step.function(*args, **kwargs)
            for result, value in zip(step.results, made if step.several else [made], strict=True):
                if result is not None:
                    if internals.storage_id(value) not in inside:
                        raise AssertionError(
                            f"{step.label.op} copies where its fake result is a view"
                        )
                    values[id(result)] = value
        return values

    def _placed(self, like: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """The tensor for an allocation."""
        start = self.offsets[self.lifetimes.of(like)]
        memory = block[start : start + like.untyped_storage().nbytes()]
        return _place(memory, like.shape, like.stride(), like.dtype)

    def _is_allocation(self, step: Step) -> bool:
        return self.lifetimes.of(step.tensors[0]).maker is step

    def _is_constant(self, step: Step) -> bool:
        """Whether the results of a step are the same tensors in every call: allocations, and views."""
        if not step.tensors:
            return False
        if self._is_allocation(step):
            return all(self.lifetimes.of(result).planned for result in step.tensors)
        if step.function is not part_of and (
            not isinstance(step.function, internals.OpOverload)
            or internals.is_mutable(step.function)
        ):
            return False
        operands = step.operands
        return (
            getattr(step.function, "namespace", "") != COLLECTIVES
            and all(id(operand) in self.constants for operand in operands)
            and all(self.lifetimes.of(result).planned for result in step.tensors)
        )

    # -- lines --------------------------------------------------------------------------------------

    def _last_reads(self) -> dict[int, int]:
        """By value, the last step that reads it; results are read after all steps."""
        last: dict[int, int] = {}
        for at in self.steps:
            step = self.tape.steps[at]
            last.update(dict.fromkeys(map(id, (*step.tensors, *step.operands)), at))
        last.update((id(x), self.steps.stop) for x in self.outputs)
        return last

    def _lines(self) -> Iterator[Line]:
        inputs = [self._variable(tensor) for tensor in self.inputs]
        if inputs:
            yield Line(f"{', '.join(inputs)}, = args")
            yield Line("if type(args) is list: args.clear()")
        unused = [
            self.variables[id(x)]
            for x in self.inputs
            if id(x) not in self.last or id(x) in self.constants
        ]
        if unused:
            yield Line(f"del {', '.join(dict.fromkeys(unused))}")
        for at in self.steps:
            step = self.tape.steps[at]
            if self._is_constant(step):
                self.views.append(step)
                for result in step.tensors:
                    self.constants.setdefault(id(result), f"s{len(self.constants)}")
            else:
                yield from self._step(at, step)
            if self.poisoned:
                yield Line(f"poison({at})")
        yield Line(f"return [{', '.join(map(self._text, self.outputs))}]")

    def _step(self, at: int, step: Step) -> Iterator[Line]:
        text = self._call(step)
        new = [x is not None and not self._has_name(x) for x in step.results]
        targets = [
            self._variable(x) if fresh and x is not None else "_"
            for x, fresh in zip(step.results, new, strict=True)
        ]
        if step.several:
            text = f"{', '.join(targets)}, = {text}"
        elif any(new):
            text = f"{targets[0]} = {text}"
        yield Line(text, step.label)
        used = dict.fromkeys(map(id, (*step.operands, *step.tensors)))
        variables = (x for x in used if x in self.variables and x not in self.constants)
        dead = [self.variables[x] for x in variables if self.last[x] == at]
        if step.several and "_" in targets:
            dead.append("_")
        if dead:
            yield Line(f"del {', '.join(dead)}")

    def _has_name(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.constants or id(tensor) in self.variables

    def _variable(self, tensor: torch.Tensor) -> str:
        return self.variables.setdefault(id(tensor), f"v{len(self.variables)}")

    def _call(self, step: Step) -> str:
        if step.function is part_of and any(step.args[0] is x for x in self.tape.inputs):
            return self._text(step.args[0])  # a donated argument itself: a view would keep it alive
        arguments = [self._text(value) for value in step.args]
        arguments += [f"{key}={self._text(value)}" for key, value in step.kwargs.items()]
        function = callee(step.function)
        key = f"f_{id(function):x}"
        self.names[key] = function
        return f"{key}({', '.join(arguments)})"

    def _text(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            known = self.constants.get(id(value)) or self.variables.get(id(value))
            if known is not None:
                return known
        return text_of(value, self._text, self.names)


def _place(
    memory: torch.Tensor, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor in bytes of a block, in a storage of its own.

    torch takes tensors that share a storage for views of each other: `linalg.qr` then assumes that its
    results overlap, and waiting for one collective waits for all. An exported tensor is in a new storage
    of the same memory.
    """
    return from_dlpack(memory).view(dtype).as_strided(shape, strides)


class _Poison:
    """Overwrites memory that nothing uses after a step.

    Args:
        dead: bytes, each with the last step that uses them.
    """

    def __init__(self, dead: Iterable[tuple[int, torch.Tensor]]) -> None:
        self.dead: dict[int, list[torch.Tensor]] = {}
        for at, memory in dead:
            self.dead.setdefault(at, []).append(memory)

    def __call__(self, at: int) -> None:
        for memory in self.dead.get(at, ()):
            memory.fill_(_POISON)


# Bytes of it are NaN in every floating dtype.
_POISON = 0xFF
_poisoned = False


def is_poisoned() -> bool:
    """Whether programs overwrite memory that is not in use."""
    return _poisoned


@contextmanager
def poisoned() -> Iterator[None]:
    """A context for tests: programs that are planned in it overwrite memory that is not in use."""
    global _poisoned
    before, _poisoned = _poisoned, True
    try:
        yield
    finally:
        _poisoned = before

