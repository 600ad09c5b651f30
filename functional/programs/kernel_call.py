"""Fused: what a node calls that stands for several operations.

A neutral contract between those who fuse and those who rewrite or run what has been fused: whoever
needs the operations (a tracer, a partitioner with a split dim that must be whole) asks for the
``reference``; whoever splits it asks for its ``rule``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchard.functional import torch_internals as internals

__all__ = ["Fused"]

Run = Callable[..., Any]
OperandShapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Fused:
    """A call of a kernel; equal where the key is.

    Attributes:
        name: of the kernel.
        key: what it does: two calls with equal keys are the same.
        reference: the operations it stands for.
        choose: for these tensors, what runs it; asked once per shapes, dtypes, devices and strides.
        rule: a factor rule for these shapes of operands and results; None: it comes apart.
        shared_storage: its results may be views of one buffer.
    """

    name: str
    key: Hashable
    reference: Run
    choose: Callable[[Sequence[torch.Tensor]], Run]
    rule: Callable[[OperandShapes, OperandShapes], str | None]
    shared_storage: bool = False
    chosen: dict[Hashable, Run] = field(default_factory=dict)

    @property
    def __name__(self) -> str:
        return self.name

    namespace = "torchard_kernels"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fused) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *tensors: torch.Tensor) -> Any:
        # Who traces wants to see operations; torch.func knows no derivative of a kernel; and
        # tensors of other kinds (fakes) have no memory.
        plain = all(type(t) is torch.Tensor or type(t) is torch.nn.Parameter for t in tensors)
        if not plain or internals.has_modes() or internals.has_transforms():
            return self.reference(*tensors)
        key = tuple((t.shape, t.dtype, t.device, t.stride()) for t in tensors)
        run = self.chosen.get(key)
        if run is None:
            run = self.chosen[key] = self.choose(tensors)
        return run(*tensors)
