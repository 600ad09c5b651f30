"""The target of a fused node: a kernel bound to an occurrence."""

from __future__ import annotations

from collections import UserString
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from torchard.functional.core.errors import KernelError
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.program import Program
from torchard.kernels.execution.autotune import Choice
from torchard.kernels.execution.optional_backends import implementation
from torchard.kernels.patterns.gradient import RESULT
from torchard.kernels.patterns.kernel import Implementations, Kernel
from torchard.kernels.patterns.match import Occurrence
from torchard.kernels.patterns.pattern import Pattern
from torchard.kernels.terms.reading import Reading

__all__ = ["KernelRegion", "fused_of", "has_own_code", "implementations_of", "runs_by_itself"]

Tensors = Sequence[torch.Tensor]


def fused_of(
    kernel: Kernel, occurrence: Occurrence, compiler: str, reading: Reading
) -> tuple[Fused, UserString]:
    """The target of a fused node, and a label that is updated once an implementation is chosen."""
    region = KernelRegion(kernel, occurrence, compiler)
    numels = [value.access.numel for value in occurrence.inputs]
    region.way.data = region.label(reading.device.type, numels)
    fused = Fused(
        kernel.name,
        region.key,
        region.reference,
        region.choose,
        region.rule,
        kernel.shared_storage,
        opaque=runs_by_itself(kernel, occurrence, reading.device.type),
    )
    return fused, region.way


def has_own_code(kernel: Kernel, device: str) -> bool:
    """Whether a kernel, its gradient or both at once have an implementation for a device."""
    vjp = kernel.vjp if isinstance(kernel.vjp, Mapping) else {}
    each = kernel.implementations, vjp, kernel.joint
    return any(implementation(entries, device).run is not None for entries in each)


def runs_by_itself(kernel: Kernel, occurrence: Occurrence, device: str) -> bool:
    """Whether a kernel has an implementation for a device, so that no compiler runs its reference."""
    return implementation(implementations_of(kernel, occurrence.pattern), device).run is not None


class KernelRegion(Choice):
    """A kernel with the literals of one occurrence.

    Args:
        occurrence: the occurrence, whose reference and literals are used.
        compiler: the compiler for devices without an implementation.
    """

    def __init__(self, kernel: Kernel, occurrence: Occurrence, compiler: str) -> None:
        super().__init__()
        self.kernel, self.occurrence, self.compiler = kernel, occurrence, compiler
        self.name, self.implementations = kernel.name, implementations_of(kernel, occurrence.pattern)
        self.by_time, self.dims = kernel.by_time, occurrence.pattern.dims
        self.literals = dict(occurrence.literals)

    @property
    def key(self) -> Hashable:
        occurrence = self.occurrence
        return (
            self.kernel,
            occurrence.alternative,
            occurrence.literals,
            occurrence.operations,
            self.compiler,
        )

    def rule(self, ins: Any, outs: Any) -> str | None:
        """The factor rule of the region for these shapes."""
        return None if self.dims is None else self.dims.rule(ins, outs)

    def program(self, tensors: Tensors) -> Program:
        specs = tuple((tuple(t.shape), t.dtype) for t in tensors)
        of = self.occurrence
        program = of.alternative.at(specs, of.literals, of.operations, tensors[0].device)
        if program is None:
            shapes = ", ".join(str(list(shape)) for shape, _ in specs)
            raise KernelError(f"kernel {self.kernel.name!r} cannot be run on {shapes}")
        return program


def implementations_of(kernel: Kernel, pattern: Pattern) -> Implementations:
    """The kernel's implementations, if they take this pattern's inputs; a gradient's may not."""
    first = kernel.patterns[0].inputs
    alike = len(first) == len(pattern.inputs) and all(
        mine.startswith(RESULT) == theirs.startswith(RESULT)
        for mine, theirs in zip(pattern.inputs, first, strict=True)
    )
    return kernel.implementations if kernel.of is None or alike else {}
