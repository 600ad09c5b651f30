"""The computation of all rivals: 8 MLP layers, forward and backward, with the input's gradient.

    x [batch, sequence, h];  each layer: h -> 4h, GELU, 4h -> h, with biases

A rival gets the whole parameters and keeps the shards of its rank: "up" is split by its output dim,
"down" by its input dim. One call of `run` is timed, which ends when the output and all gradients are
computed: the output and x's gradient whole on both ranks, those of the parameters sharded as these are.
The last layer's output must be computed, although no gradient needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["NAMES", "SHAPES", "Layer", "Problem", "Rival", "Shape", "forward", "reference"]

# The parameters of a layer, in the order in which gradients are listed, and the dim that is split.
NAMES = {"up_w": 0, "up_b": 0, "down_w": 1, "down_b": None}

Layer = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The sizes of the workload, and the number of rounds in which rivals are timed."""

    hidden: int
    batch: int
    sequence: int
    rounds: int
    layers: int = 8

    def __str__(self) -> str:
        return f"h {self.hidden}, {self.batch}×{self.sequence}"


SHAPES = (Shape(64, 2, 16, 200), Shape(256, 2, 64, 80), Shape(1024, 2, 128, 15))


@dataclass(frozen=True)
class Problem:
    """The whole values, the same on every rank: layers, input, and the cotangent of the output."""

    layers: list[Layer]
    x: Tensor
    cotangent: Tensor

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype = torch.float32) -> Problem:
        draw = torch.Generator().manual_seed(0)

        def normal(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, generator=draw, dtype=torch.float64) * scale).to(dtype)

        h = shape.hidden
        layers = [
            {
                "up_w": normal(4 * h, h, scale=1.5 * h**-0.5),
                "up_b": normal(4 * h, scale=0.1),
                "down_w": normal(h, 4 * h, scale=(4 * h) ** -0.5),
                "down_b": normal(h, scale=0.1),
            }
            for _ in range(shape.layers)
        ]
        size = (shape.batch, shape.sequence, h)
        return cls(layers, normal(*size), normal(*size))

    def part(self, rank: int, ranks: int) -> list[Layer]:
        """The shards of the layers that a rank holds."""
        return [
            {
                name: layer[name].clone() if dim is None else _chunk(layer[name], dim, rank, ranks)
                for name, dim in NAMES.items()
            }
            for layer in self.layers
        ]


def _chunk(x: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    return x.chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Rival:
    """An implementation of the workload.

    Attributes:
        name: its name in the table.
        run: one forward and backward, which is timed.
        whole: a function from the result of `run` to whole tensors: the output, and the gradients of x
            and of NAMES layer by layer.
    """

    name: str
    run: Callable[[], Any]
    whole: Callable[[Any], list[Tensor]]


def forward(layers: list[Layer], x: Tensor) -> Tensor:
    """The function on one device."""
    for layer in layers:
        x = F.linear(
            F.gelu(F.linear(x, layer["up_w"], layer["up_b"])), layer["down_w"], layer["down_b"]
        )
    return x


def reference(shape: Shape) -> list[Tensor]:
    """The output and all gradients on one device in float64."""
    problem = Problem.of(shape, torch.float64)
    leaves = [problem.x, *(layer[name] for layer in problem.layers for name in NAMES)]
    for leaf in leaves:
        leaf.requires_grad_()
    y = forward(problem.layers, problem.x)
    return [y.detach(), *torch.autograd.grad(y, leaves, problem.cotangent)]
