"""Tensor parallelism written by hand, as in Megatron-LM and further optimized.

Three versions, each faster than the one before where computation outweighs latency:

- ``f/g``: the two conjugate functions of the paper (Shoeybi et al., arXiv:1909.08053, section 3).
- ``async``: the column-parallel linear of Megatron-LM (LinearWithGradAccumulationAndAsyncCommunication):
  the input gradient's all_reduce runs while the weight's gradient is computed.
- ``layer``: a whole layer as one autograd.Function, in which the gradients of *all* parameters are
  computed while that all_reduce runs, and nothing is saved or copied without need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from workload import NAMES, Layer, Problem, Rival

__all__ = ["rivals"]

Apply = Callable[[Tensor, Layer], Tensor]
aten = torch.ops.aten


class CopyIn(torch.autograd.Function):
    """f: the identity, whose backward sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class ReduceOut(torch.autograd.Function):
    """g: the sum over ranks, whose backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class ColumnLinear(torch.autograd.Function):
    """f followed by a linear, with communication and computation overlapped in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = ctx.saved_tensors
        gx = g.matmul(w)
        sent = dist.all_reduce(gx, async_op=True)
        flat = g.view(-1, g.shape[-1])
        gw = flat.t().mm(x.view(-1, x.shape[-1]))
        gb = flat.sum(0)
        sent.wait()
        return gx, gw, gb


class WholeLayer(torch.autograd.Function):
    """A layer (linear, GELU, linear, all_reduce, bias) on tokens flattened to [n, h]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up_w: Tensor, up_b: Tensor, down_w: Tensor, down_b: Tensor
    ) -> Tensor:
        z = torch.addmm(up_b, x, up_w.t())
        a = F.gelu(z)
        y = a.mm(down_w.t())
        dist.all_reduce(y)
        ctx.save_for_backward(x, z, a, up_w, down_w)
        return y.add_(down_b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, z, a, up_w, down_w = ctx.saved_tensors
        gz = aten.gelu_backward(g.mm(down_w), z)
        gx = gz.mm(up_w)
        sent = dist.all_reduce(gx, async_op=True)
        grads = gz.t().mm(x), gz.sum(0), g.t().mm(a), g.sum(0)
        sent.wait()
        return gx, *grads


# torch does not annotate `apply`.
copy_in: Any = CopyIn.apply
reduce_out: Any = ReduceOut.apply
column_linear: Any = ColumnLinear.apply
whole_layer: Any = WholeLayer.apply


def _paper(x: Tensor, layer: Layer) -> Tensor:
    a = F.gelu(F.linear(copy_in(x), layer["up_w"], layer["up_b"]))
    y: Tensor = reduce_out(F.linear(a, layer["down_w"])) + layer["down_b"]
    return y


def _overlapped(x: Tensor, layer: Layer) -> Tensor:
    a = F.gelu(column_linear(x, layer["up_w"], layer["up_b"]))
    y: Tensor = reduce_out(F.linear(a, layer["down_w"])) + layer["down_b"]
    return y


def _one_function(x: Tensor, layer: Layer) -> Tensor:
    flat: Tensor = whole_layer(x.view(-1, x.shape[-1]), *(layer[name] for name in NAMES))
    return flat.view_as(x)


def rivals(problem: Problem) -> list[Rival]:
    """The three versions, each with its own parameters."""
    versions = {"f/g": _paper, "async": _overlapped, "layer": _one_function}
    return [_rival(f"by hand, {name}", apply, problem) for name, apply in versions.items()]


def _rival(name: str, apply: Apply, problem: Problem) -> Rival:
    layers = problem.part(dist.get_rank(), dist.get_world_size())
    x = problem.x.clone()
    leaves = [x, *(layer[name] for layer in layers for name in NAMES)]
    for leaf in leaves:
        leaf.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        y = x
        for layer in layers:
            y = apply(y, layer)
        return y, *torch.autograd.grad(y, leaves, problem.cotangent)

    return Rival(name, run, _whole)


def _whole(values: tuple[Tensor, ...]) -> list[Tensor]:
    y, gx, *rest = values
    dims = list(NAMES.values()) * (len(rest) // len(NAMES))
    return [
        y.detach(),
        gx,
        *(g if d is None else _gathered(g, d) for g, d in zip(rest, dims, strict=True)),
    ]


def _gathered(part: Tensor, dim: int) -> Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)
