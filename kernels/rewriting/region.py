"""From an occurrence and a kernel to what a node calls."""

from __future__ import annotations

from collections import UserString
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from torchard.functional.core.errors import KernelError
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.program import Program
from torchard.kernels.execution.autotune import Choice
from torchard.kernels.patterns.gradient import RESULT
from torchard.kernels.patterns.kernel import Implementations, Kernel
from torchard.kernels.patterns.match import Occurrence
from torchard.kernels.patterns.pattern import Pattern
from torchard.kernels.terms.reading import Reading

__all__ = ["KernelRegion", "fused_of", "implementations_of"]

Tensors = Sequence[torch.Tensor]


def fused_of(
    kernel: Kernel, found: Occurrence, compiler: str, reading: Reading
) -> tuple[Fused, UserString]:
    """What the node calls, and how it runs: said anew once that is chosen."""
    region = KernelRegion(kernel, found, compiler)
    numels = [value.access.numel for value in found.inputs]
    region.way.data = region.label(reading.device.type, numels)
    made = Fused(
        kernel.name, region.key, region.reference, region.choose, region.rule, kernel.shared_storage
    )
    return made, region.way


class KernelRegion(Choice):
    """One kernel with its literals.

    Args:
        found: which of its references, with which literals, was there.
        compiler: of what has no implementation.
    """

    def __init__(self, kernel: Kernel, found: Occurrence, compiler: str) -> None:
        super().__init__()
        self.kernel, self.found, self.compiler = kernel, found, compiler
        self.name, self.implementations = kernel.name, implementations_of(kernel, found.pattern)
        self.by_time, self.dims = kernel.by_time, found.pattern.dims
        self.literals = dict(found.literals)

    @property
    def key(self) -> Hashable:
        found = self.found
        return (
            self.kernel,
            found.alternative,
            found.literals,
            found.operations,
            self.compiler,
        )

    def rule(self, ins: Any, outs: Any) -> str | None:
        """How it may be split."""
        return None if self.dims is None else self.dims.rule(ins, outs)

    def program(self, tensors: Tensors) -> Program:
        specs = tuple((tuple(t.shape), t.dtype) for t in tensors)
        found = self.found
        program = found.alternative.at(specs, found.literals, found.operations, tensors[0].device)
        if program is None:
            shapes = ", ".join(str(list(shape)) for shape, _ in specs)
            raise KernelError(f"kernel {self.kernel.name!r} cannot be run on {shapes}")
        return program


def implementations_of(kernel: Kernel, pattern: Pattern) -> Implementations:
    """Those for a pattern's inputs: a gradient's are of what its first reference's formulas read."""
    first = kernel.patterns[0].inputs
    alike = len(first) == len(pattern.inputs) and all(
        mine.startswith(RESULT) == theirs.startswith(RESULT)
        for mine, theirs in zip(pattern.inputs, first, strict=True)
    )
    return kernel.implementations if kernel.of is None or alike else {}
