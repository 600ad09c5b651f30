"""quantize(fn): rounds the inputs whose paths match; gradients pass straight through the rounding.

Source: Bengio et al. 2013 (arXiv:1308.3432), straight-through estimator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from torchard import Mesh, P, checkpoint, shard
from torchard.transforms import Leaf, Transformed, ValueRewrite


@dataclass(frozen=True)
class Quantize(ValueRewrite):
    where: str
    step: float

    def input(self, leaf: Leaf, value: torch.Tensor) -> torch.Tensor:
        if not fnmatchcase(leaf.path, self.where):
            return value
        rounded = (value / self.step).round() * self.step
        return value + (rounded - value).detach()


def quantize(fn: Callable[..., Any], where: str = "args?0?*", step: float = 1 / 16) -> Transformed:
    return Transformed(fn, [Quantize(where, step)])


if __name__ == "__main__":
    w, x = torch.ones(8, 8), torch.ones(4, 8)
    gradient = torch.func.grad(checkpoint(quantize(lambda w, x: (x @ w).square().mean())))
    mesh = Mesh({"tp": 2}, virtual=True)
    program = shard(gradient, mesh, in_specs=(P(None, "tp"), P())).lower(w, x)
    print(program.collectives)  # none: each rank rounds its own columns
