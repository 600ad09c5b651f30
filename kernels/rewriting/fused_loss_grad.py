"""Fusing a kernel with its gradient, where the cotangent does not depend on the kernel's results.

A loss is the end of a forward, and its cotangent is known in advance. One pass over the logits then
computes both, and the gradient recomputes nothing.

Source: Hsu et al. 2024 (arXiv:2410.10989), section 3.2.
"""

from __future__ import annotations

from collections import UserString
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchard.functional.core.outputs import outputs_of
from torchard.functional.programs.graphs import Inserter, substitute
from torchard.functional.programs.kernel_call import Fused
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.functional.trace import trace
from torchard.kernels.execution.autotune import Choice
from torchard.kernels.execution.optional_backends import implementation
from torchard.kernels.patterns.gradient import RESULT
from torchard.kernels.patterns.kernel import Kernel
from torchard.kernels.patterns.match import Occurrence
from torchard.kernels.rewriting.region import KernelRegion

__all__ = ["Pair", "let_go_of_losses"]


class Pair:
    """An occurrence of a kernel and one of its gradient.

    Attributes:
        merged: one occurrence of both, with the kernel's inputs first; None if they cannot be merged.
    """

    def __init__(self, kernel: Kernel, forward: Occurrence, backward: Occurrence) -> None:
        self.kernel, self.members = kernel, (forward, backward)
        self.positions: list[int] = []
        self.merged = self._merge()

    @property
    def name(self) -> str:
        return f"{self.kernel.name}_with_backward"

    def _merge(self) -> Occurrence | None:
        forward, backward = self.members
        if forward.literals != backward.literals or not all(map(_complete, self.members)):
            return None
        names, inputs = forward.pattern.inputs, list(forward.inputs)
        results = {f"{RESULT}{root.output}": root for root in forward.roots}
        for name, value in zip(backward.pattern.inputs, backward.inputs, strict=True):
            if name in results:
                if results[name].value != value:
                    return None
                self.positions.append(-1 - results[name].output)
            elif name not in names:
                self.positions.append(len(inputs))
                inputs.append(value)
            elif inputs[names.index(name)] == value:
                self.positions.append(names.index(name))
            else:
                return None  # the two read an input in different dims
        count = len(forward.roots)
        more = (replace(root, output=root.output + count) for root in backward.roots)
        return replace(forward, inputs=tuple(inputs), roots=(*forward.roots, *more))

    def fused(self, device: torch.device, compiler: str) -> tuple[Fused, UserString] | None:
        """The target of the fused node, and its label; None if no implementation runs both at once."""
        if implementation(self.kernel.joint, device.type).run is None:
            return None
        backward = self.kernel.gradient
        assert backward is not None
        regions = [
            KernelRegion(kernel, occurrence, compiler)
            for kernel, occurrence in zip((self.kernel, backward), self.members, strict=True)
        ]
        both = _Both(self.name, self.kernel, regions, self.positions)
        both.way.data = both.label(device.type, [])
        fused = Fused(
            self.name, both.key, both.reference, both.choose, lambda ins, outs: None, opaque=True
        )
        return fused, both.way


class _Both(Choice):
    """The choice of an implementation that runs a kernel and its gradient at once.

    Args:
        positions: the positions of the gradient's inputs among the merged inputs; -1 - j for output j.
    """

    def __init__(
        self, name: str, kernel: Kernel, regions: Sequence[KernelRegion], positions: Sequence[int]
    ) -> None:
        super().__init__()
        self.name, self.implementations = name, kernel.joint
        self.forward, self.backward = regions
        self.positions, self.compiler = tuple(positions), self.forward.compiler
        self.literals, self.dims = self.forward.literals, None

    @property
    def key(self) -> Hashable:
        return "both", self.forward.key, self.backward.key, self.positions

    def program(self, tensors: Sequence[torch.Tensor]) -> Program:
        return trace(self._both)(*tensors)

    def _both(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        count = len(self.forward.occurrence.inputs)
        results = outputs_of(self.forward.reference(*tensors[:count]))
        read = (tensors[i] if i >= 0 else results[-1 - i] for i in self.positions)
        return *results, *outputs_of(self.backward.reference(*read))


def _complete(occurrence: Occurrence) -> bool:
    """Whether all outputs of the pattern were found, in order, each as a value of its own."""
    outputs = range(len(occurrence.alternative.skeleton.roots))
    return [root.output for root in occurrence.roots] == list(outputs) and not any(
        root.rest for root in occurrence.roots
    )


def let_go_of_losses(program: Program) -> None:
    """Replace ``ones_like(loss)``, a seed cotangent, by ones that do not depend on the loss."""
    for node in program.graph.find_nodes(op="call_function", target=aten.ones_like.default):
        val = VAL.of(node)
        if val.ndim:
            continue
        kind = {"dtype": val.dtype, "device": val.device}
        substitute(node, Inserter(node)(aten.ones.default, [], same="value", **kind))
