"""Updates: the updates of many parameters as one value, and the kernels of torch that compute them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchard.functional import torch_internals as internals
from torchard.functional.updates.arithmetic import adam_corrections, adamw_step, sgd_step

__all__ = ["AdamWUpdate", "SgdUpdate", "Update"]

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class Update(ABC):
    """The target of a node that updates many parameters, as a function of values.

    It is called with the tensors that are updated (all parameters, then each tree of their state), the
    gradients, and what all parameters share; it returns the updated tensors.

    Attributes:
        kind: the optimizer.
        dtypes: those in which its kernel is right.
        width: the number of tensors that are updated for each parameter.
        shared: the number of 0-d values that all parameters share.
    """

    kind: ClassVar[str]
    dtypes: ClassVar[frozenset[torch.dtype]]
    width: ClassVar[int]
    shared: ClassVar[int]
    namespace: ClassVar[str] = "torchard"  # whose operators keep none of their operands

    def __call__(self, bases: Tensors, grads: Tensors, *shared: Any) -> tuple[Tensor, ...]:
        count = len(grads)
        new = [self.one(*bases[i::count], grad, *shared) for i, grad in enumerate(grads)]
        return tuple(row[k] for k in range(self.width) for row in new)

    @property
    @abstractmethod
    def __name__(self) -> str:
        """The name that programs show."""

    @abstractmethod
    def one(self, *operands: Any) -> tuple[Tensor, ...]:
        """The updated tensors of one parameter, by its tensors, its gradient and what is shared."""

    @abstractmethod
    def write(self, bases: Sequence[Tensors], grads: Tensors, *shared: Any) -> None:
        """Update tensors in place, by a kernel: the parameters, and each tree of their state."""

    def __repr__(self) -> str:
        return self.__name__


@dataclass(frozen=True, repr=False)
class AdamWUpdate(Update):
    """AdamW with these numbers; the count of steps, in float64, and the learning rate are shared."""

    b1: float
    b2: float
    eps: float
    decay: float

    kind = "adamw"
    dtypes = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
    width = 3
    shared = 2

    @property
    def __name__(self) -> str:
        return f"adamw[b1={self.b1}, b2={self.b2}, eps={self.eps}, decay={self.decay:.6g}]"

    def one(self, *operands: Any) -> tuple[Tensor, ...]:
        p, m, s, g, count, rate = operands
        corrections = adam_corrections(count, rate, self.b1, self.b2)
        return adamw_step(p, m, s, g, corrections, 1 - rate * self.decay, self.b1, self.b2, self.eps)

    def write(self, bases: Sequence[Tensors], grads: Tensors, *shared: Any) -> None:
        params, means, squares = bases
        count, rate = shared
        steps = [count.to(grads[0].device, torch.float32)] * len(grads)
        numbers = {"beta1": self.b1, "beta2": self.b2, "eps": self.eps, "weight_decay": self.decay}
        internals.fused_adamw(params, means, squares, grads, steps, rate, numbers)


@dataclass(frozen=True, repr=False)
class SgdUpdate(Update):
    """Stochastic gradient descent with momentum, and these numbers; the learning rate is shared."""

    momentum: float
    nesterov: bool
    decay: float

    kind = "sgd"
    # In half precision, velocities on CPUs are wrong (torch 2.13).
    dtypes = frozenset({torch.float32, torch.float64})
    width = 2
    shared = 1

    @property
    def __name__(self) -> str:
        kind = ", nesterov" * self.nesterov
        return f"sgd[momentum={self.momentum}{kind}, decay={self.decay}]"

    def one(self, *operands: Any) -> tuple[Tensor, ...]:
        p, v, g, rate = operands
        return sgd_step(p, v, g, rate, self.decay, self.momentum, self.nesterov)

    def write(self, bases: Sequence[Tensors], grads: Tensors, *shared: Any) -> None:
        params, velocities = bases
        (rate,) = shared
        numbers = {"momentum": self.momentum, "weight_decay": self.decay, "nesterov": self.nesterov}
        internals.fused_sgd(params, velocities, grads, rate, numbers)
