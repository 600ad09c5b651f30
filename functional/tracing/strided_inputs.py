"""``as_strided`` of a function's inputs: the elements that it reads depend on the memory layout.

A trace knows the strides of its inputs, not their storage offsets. Under vmap it does not know the
strides either: a transform receives contiguous samples, whatever strides torch's samples have. So a
program that reads an input by strides is correct only for inputs with the memory layout of the trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import PurityError
from torchard.functional.effects.mutation import argument, storage_key
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import SOURCE, STRIDED
from torchard.functional.torch_internals.operators import aten
from torchard.functional.tracing.trace_state import TraceState

__all__ = ["StridedInput", "check_memory", "pass_on", "strided_inputs"]

_STRIDED = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)


@dataclass(frozen=True)
class StridedInput:
    """An input whose memory a line of the function reads by strides.

    Attributes:
        absolute: whether offsets count from the start of the storage, not from the input's first element.
    """

    number: int
    path: str
    source: str
    absolute: bool

    def check(self, value: Any) -> None:
        """Check that a value of this input has the memory layout that the trace assumes.

        Raises:
            PurityError: the layout differs, so the program would read other elements than the function.
        """
        if not isinstance(value, torch.Tensor):
            return  # a float, or a placed value: its global value is contiguous
        start = internals.base_tensor(value).storage_offset()
        if self.absolute and start:
            raise PurityError(
                f"{self.source} reads {self.path} by as_strided with a storage_offset, and {self.path} "
                f"begins at element {start} of its storage: a trace sees the tensor, not the storage "
                "before it. Omit storage_offset to count from the first element, pass a clone(), or use "
                "slices."
            )
        if internals.VMAP in internals.level_kinds() and not value.is_contiguous():
            raise PurityError(
                f"{self.source} reads {self.path} by as_strided under vmap, and one sample of it has "
                f"strides {list(value.stride())}: a transform is given contiguous samples, so it would "
                "read other elements. Use slices, or map over dim 0 of a contiguous tensor."
            )


def check_memory(reads: Sequence[StridedInput], *values: Sequence[Any]) -> None:
    """Check all values of a call: arguments, then closed-over tensors."""
    given = list(chain(*values))
    for read in reads:
        if read.number < len(given):  # the other inputs are constants that the trace created
            read.check(given[read.number])


def pass_on(reads: Sequence[StridedInput], operands: Sequence[torch.Tensor], state: TraceState) -> None:
    """Tag the operands of a call inside a trace with these reads, since operands may be its inputs."""
    for read in reads:
        if read.number < len(operands):
            node = internals.proxy_node(state.tracer, internals.base_tensor(operands[read.number]))
            if node is not None:
                STRIDED.set(node, (*STRIDED.get(node, ()), (read.source, read.absolute)))


def strided_inputs(program: Program) -> list[StridedInput]:
    """The inputs whose memory the program, or a transform that it calls, reads by strides."""
    reads = list(_reads(program.graph))
    if not reads:
        return []
    numbers = {storage_key(node): i for i, node in enumerate(program.placeholders)}
    return [
        StridedInput(numbers[key], program.inputs[numbers[key]].path, source, absolute)
        for key, source, absolute in reads
        if key in numbers
    ]


def _reads(graph: fx.Graph) -> Iterator[tuple[int | None, str, bool]]:
    """For each read by strides: the storage, the source line, and whether offsets are absolute."""
    for node in graph.nodes:
        if node.target in _STRIDED:
            absolute = argument(node, "storage_offset") is not None
            yield storage_key(node.args[0]), str(SOURCE.get(node)), absolute
        for source, absolute in STRIDED.get(node, ()):
            yield storage_key(node), source, absolute
