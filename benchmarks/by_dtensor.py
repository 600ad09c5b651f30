"""PyTorch's own tensor parallelism: parallelize_module over DTensor, eager and compiled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from workload import Problem, Rival

from torchard.functional.torch_internals.operators import c10d

__all__ = ["rivals"]


class Mlp(nn.Module):
    """A layer of the workload."""

    def __init__(self, layer: dict[str, Tensor]) -> None:
        super().__init__()
        self.up = _linear(layer["up_w"], layer["up_b"])
        self.down = _linear(layer["down_w"], layer["down_b"])

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(self.up(x)))
        return hidden


def _linear(w: Tensor, b: Tensor) -> nn.Linear:
    linear = nn.Linear(w.shape[1], w.shape[0])
    with torch.no_grad():
        linear.weight.copy_(w)
        linear.bias.copy_(b)
    return linear


def rivals(problem: Problem, mesh: DeviceMesh | None, compiled: bool) -> list[Rival]:
    """DTensor run eagerly, and also compiled if requested."""
    versions = [_rival("DTensor, eager", problem, mesh, False)]
    if compiled:
        versions.append(_rival("DTensor, torch.compile", problem, mesh, True))
    return versions


def _rival(name: str, problem: Problem, mesh: DeviceMesh | None, compiled: bool) -> Rival:
    layers = [Mlp(layer) for layer in problem.layers]
    for layer in layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = problem.x.clone().requires_grad_()
    leaves = [x]
    for layer in layers:  # in the order of NAMES
        leaves += [layer.up.weight, layer.up.bias, layer.down.weight, layer.down.bias]
    model = nn.Sequential(*layers)
    # Static shapes: torch.compile would use dynamic ones at the second size, where torch 2.13 fails.
    call = torch.compile(model, dynamic=False) if compiled else model

    def run() -> tuple[Tensor, ...]:
        y = call(x)
        grads = torch.autograd.grad(y, leaves, problem.cotangent)
        # Otherwise the last layer's all_reduce might not be complete.
        return c10d.wait_tensor.default(y), *grads

    return Rival(name, run, _whole)


def _whole(values: tuple[Tensor, ...]) -> list[Tensor]:
    return [v.full_tensor() if isinstance(v, DTensor) else v.detach() for v in values]
