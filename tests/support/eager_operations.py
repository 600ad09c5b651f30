"""Operations on placed values in plain code, and their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from effort import examples

from torchard import (
    Mesh,
    MeshTensor,
)

MESHES = [Mesh(axes, virtual=True) for axes in ({"a": 2}, {"a": 3, "b": 1}, {"a": 2, "b": 2})]

MESH = MESHES[2]

# Of x and y, both [4, 6].
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "x + y": lambda x, y: x + y,
    "x + 1": lambda x, y: x + 1,
    "1.5 - x": lambda x, y: 1.5 - x,
    "x * y": lambda x, y: x * y,
    "x / 3": lambda x, y: x / 3,
    "2 / x": lambda x, y: 2 / x,
    "x // 2": lambda x, y: x.detach() // 2,
    "x % 2": lambda x, y: x % 2,
    "x ** 2": lambda x, y: x**2,
    "2 ** x": lambda x, y: 2**x,
    "-x": lambda x, y: -x,
    "abs(x)": lambda x, y: abs(x - 3),
    "x @ y.T": lambda x, y: x @ y.T,
    "x == y": lambda x, y: x == y,
    "x > y": lambda x, y: x > y,
    "x <= 2": lambda x, y: x <= 2,
    "(x > 2) & ~(y > 3)": lambda x, y: (x > 2) & ~(y > 3),
    "x[0]": lambda x, y: x[0],
    "x[-1, 2]": lambda x, y: x[-1, 2],
    "x[1:3]": lambda x, y: x[1:3],
    "x[:, ::2]": lambda x, y: x[:, ::2],
    "x[..., None]": lambda x, y: x[..., None],
    "x[[2, 0]]": lambda x, y: x[[2, 0]],
    "x[tensor]": lambda x, y: x[torch.tensor([3, 3, 1])],
    "x[tensor, tensor]": lambda x, y: x[torch.tensor([3, 1]), torch.tensor([0, 5])],
    "list(x)": lambda x, y: list(x),
    "sum of rows": lambda x, y: sum(row * i for i, row in enumerate(y)),
    "x.sum()": lambda x, y: x.sum(),
    "x.mean(0)": lambda x, y: x.mean(0),
    "x.norm()": lambda x, y: x.norm(),
    "x.std(1)": lambda x, y: x.std(1),
    "x.max(1)": lambda x, y: x.max(dim=1),
    "x.argmax(-1)": lambda x, y: x.argmax(-1),
    "x.cumsum(0)": lambda x, y: x.cumsum(0),
    "x.softmax(1)": lambda x, y: x.softmax(1),
    "x.T": lambda x, y: x.T,
    "x.mT": lambda x, y: x.mT,
    "x.reshape": lambda x, y: x.reshape(2, 12),
    "x.flatten": lambda x, y: x.flatten(),
    "x.split": lambda x, y: x.split(3, dim=1),
    "x.clamp": lambda x, y: x.clamp(min=0.5, max=4.0),
    "x.to(float32)": lambda x, y: x.to(torch.float32),
    "x.double()": lambda x, y: x.double(),
    "x.clone()": lambda x, y: x.clone(),
    "x.detach() * x": lambda x, y: x.detach() * x,
    "x.expand": lambda x, y: x[:1].expand(3, 6),
    "torch.exp": lambda x, y: torch.exp(x),
    "torch.where": lambda x, y: torch.where(x > y, x, 0.5),
    "torch.cat": lambda x, y: torch.cat([x, y], dim=1),
    "torch.stack": lambda x, y: torch.stack([x, y]),
    "torch.einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "torch.maximum": lambda x, y: torch.maximum(x, y),
    "torch.zeros_like": lambda x, y: torch.zeros_like(x),
    "torch.full_like": lambda x, y: torch.full_like(x, 2.5),
    "torch.linalg.vector_norm": lambda x, y: torch.linalg.vector_norm(x, dim=0),
    "F.gelu": lambda x, y: F.gelu(x),
    "F.layer_norm": lambda x, y: F.layer_norm(x, (6,), eps=1e-3),
    "F.linear": lambda x, y: F.linear(x, y),
    "F.leaky_relu": lambda x, y: F.leaky_relu(x - 2, 0.3),
    "F.mse_loss": lambda x, y: F.mse_loss(x, y),
    "F.one_hot": lambda x, y: F.one_hot(x.long().clamp(0, 6), 7),
    "several": lambda x, y: ((x - x.mean(0)) / (x.var(0) + 1e-3).sqrt() @ y.T).relu(),
}  # fmt: skip

SOME = list(OPERATIONS)[:: examples(ci=8, explore=1)]


def whole(value: Any) -> Any:
    return value.full() if isinstance(value, MeshTensor) else value


def loss_of(results: Any) -> Any:
    """A number that depends on every floating result, each entry with another weight."""
    total: Any = 0.0
    for i, leaf in enumerate(results):
        if leaf.requires_grad:
            weights = torch.arange(float(leaf.numel()), dtype=leaf.dtype).reshape(leaf.shape)
            total = total + (leaf * (weights.sin() + i)).sum()
    return total


def outcome(operation: Any, x: Any, y: Any) -> tuple[list[Any], list[Any]]:
    """Results and the gradients of both operands."""
    results = leaves_of(operation(x.requires_grad_(), y.requires_grad_()))
    loss = loss_of(results)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return [whole(r).detach() for r in results], [whole(v.grad) for v in (x, y)]


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, (torch.Tensor, MeshTensor)):
        return [value]
    return [leaf for item in value for leaf in leaves_of(item)]


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.rand(4, 6, generator=generator, dtype=torch.float64) * 5 + 0.1 for _ in range(2))
    y[1] = x[1].round()
    return x, y
