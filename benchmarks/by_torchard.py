"""Tensor parallelism by torchard: the function for one device, sharded, and also compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from workload import NAMES, Layer, Problem, Rival, forward

from torchard import Mesh, MeshTensor, P, jit, place, shard

__all__ = ["SPECS", "gradients", "placed", "rivals"]

SPECS = {"up_w": P("tp", None), "up_b": P("tp"), "down_w": P(None, "tp"), "down_b": P()}


def _inner(layers: list[Layer], x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
    y = forward(layers, x)
    return (y * cotangent).sum(), y


gradients = torch.func.grad(_inner, argnums=(0, 1), has_aux=True)


def placed(problem: Problem, mesh: Mesh) -> Any:
    """The layers, placed on the mesh by SPECS."""
    return place(problem.layers, mesh, [SPECS] * len(problem.layers))


def rivals(problem: Problem, mesh: Mesh, compiled: bool) -> list[Rival]:
    """shard; shard of the forward alone, differentiated by autograd; and jit of shard if requested."""
    sharded = shard(gradients, mesh, out_specs=(([SPECS] * len(problem.layers), P()), P()))
    versions = [_rival("torchard, shard", sharded, problem, mesh), _by_autograd(problem, mesh)]
    if compiled:
        versions.append(_rival("torchard, jit∘shard", jit(sharded), problem, mesh))
    return versions


def _rival(name: str, run: Any, problem: Problem, mesh: Mesh) -> Rival:
    layers, x = placed(problem, mesh), problem.x.clone()
    return Rival(name, lambda: run(layers, x, problem.cotangent), _whole)


def _by_autograd(problem: Problem, mesh: Mesh) -> Rival:
    layers, x = placed(problem, mesh), problem.x.clone().requires_grad_()
    leaves = [x]
    for layer in layers:
        for name in NAMES:
            (part,) = layer[name].parts
            leaves.append(part.requires_grad_())
    run = shard(forward, mesh, out_specs=P())

    def step() -> tuple[Tensor, ...]:
        y = run(layers, x)
        return y, *torch.autograd.grad(y, leaves, problem.cotangent)

    def whole(values: tuple[Tensor, ...]) -> list[Tensor]:
        y, gx, *parts = values
        specs = [SPECS[name] for _ in layers for name in NAMES]
        shapes = [layer[name].shape for layer in problem.layers for name in NAMES]
        return [y.detach(), gx] + [
            MeshTensor.from_local(part, mesh, spec, shape=shape).full()
            for part, spec, shape in zip(parts, specs, shapes, strict=True)
        ]

    return Rival("torchard, shard + autograd", step, whole)


def _whole(result: Any) -> list[Tensor]:
    (layers, gx), y = result
    grads = [layer[name] for layer in layers for name in NAMES]
    return [y, gx, *(g.full() if isinstance(g, MeshTensor) else g for g in grads)]
