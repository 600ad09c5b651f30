"""Fused: the target of a node that stands for several operations.

It is the contract between passes that fuse operations and passes that rewrite or run fused ones. A pass
that needs the operations (a tracer, a partitioner for a split dim that must be whole) uses the
``reference``; a partitioner uses its ``rule``.
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
    """A kernel call; calls with equal keys are equal.

    Attributes:
        name: the kernel's name.
        key: identifies the computation: calls with equal keys are interchangeable.
        reference: the operations that the call replaces.
        choose: selects the implementation for tensors, once per shapes, dtypes, devices and strides.
        rule: the factor rule for these operand and result shapes. None: the call must be decomposed.
        shared_storage: whether its results may be views of one buffer.
        opaque: whether it has code of its own, which a compiler calls as it is.
    """

    name: str
    key: Hashable
    reference: Run
    choose: Callable[[Sequence[torch.Tensor]], Run]
    rule: Callable[[OperandShapes, OperandShapes], str | None]
    shared_storage: bool = False
    opaque: bool = False
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
        # A tracer needs to see the operations, torch.func has no derivative of a kernel, and other kinds
        # of tensors (fakes) have no memory.
        plain = all(type(t) is torch.Tensor or type(t) is torch.nn.Parameter for t in tensors)
        if not plain or internals.has_modes() or internals.has_transforms():
            return self.reference(*tensors)
        key = tuple((t.shape, t.dtype, t.device, t.stride()) for t in tensors)
        run = self.chosen.get(key)
        if run is None:
            run = self.chosen[key] = self.choose(tensors)
        return run(*tensors)
