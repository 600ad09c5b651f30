"""An axis that splits parameters and the positions of a sequence: the smaller of both is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torchard import Mesh, P, ShapeDtype, shard
from torchard.testing import equal

MESH = Mesh({"dp": 2, "tp": 4}, virtual=True)
LENGTH, WIDTH, HEADS, HIDDEN = 8, 16, 4, 64
BY_POSITION = P("dp", "tp")
Tree = dict[str, Any]

SHAPES = {
    **{name: (WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"},
    "o": (HEADS, WIDTH // HEADS, WIDTH),
    "up": (WIDTH, HIDDEN),
    "down": (HIDDEN, WIDTH),
}
SPECS = {
    **{name: P(None, "tp") for name in "qkv"},
    "o": P("tp"),
    "up": P(None, "tp"),
    "down": P("tp"),
}


def mlp(p: Tree, x: torch.Tensor) -> torch.Tensor:
    return x + F.gelu(F.layer_norm(x, (WIDTH,)) @ p["up"], approximate="tanh") @ p["down"]


def attention(p: Tree, x: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(x, (WIDTH,))
    q, k, v = (torch.einsum("bsd,dhe->bhse", y, p[name]) for name in "qkv")
    return x + torch.einsum("bhse,hed->bsd", (q @ k.mT).softmax(-1) @ v, p["o"])


def layer(p: Tree, x: torch.Tensor) -> torch.Tensor:
    return mlp(p, attention(p, x))


def step(model: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def loss(p: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(p, x) - y).square().mean()

    return torch.func.grad_and_value(loss)


def args(model: Callable[..., torch.Tensor], batch: int) -> tuple[Tree, Tree, tuple[Any, ...]]:
    """Parameters, their specs, and a batch."""
    names = {mlp: ["up", "down"], attention: list("qkvo"), layer: list(SHAPES)}[model]
    shape = (batch, LENGTH, WIDTH)
    return {n: SHAPES[n] for n in names}, {n: SPECS[n] for n in names}, (shape, shape)


def gathered(batch: int) -> int:
    """Bytes that a rank sends to gather the activations over tp, or to scatter their sum."""
    return batch // 2 * LENGTH * WIDTH * 4 * 3 // 4


def lowered(model: Callable[..., torch.Tensor], batch: int) -> Any:
    shapes, specs, inputs = args(model, batch)
    run = shard(step(model), MESH, (specs, BY_POSITION, BY_POSITION), out_specs=(specs, P()))
    params = {n: ShapeDtype(s) for n, s in shapes.items()}
    return run.lower(params, *(ShapeDtype(s) for s in inputs))


@pytest.mark.parametrize(("model", "blocks"), [(mlp, 1), (attention, 1), (layer, 2)])
def test_activations_are_gathered_where_they_are_smaller(
    model: Callable[..., torch.Tensor], blocks: int
) -> None:
    """Megatron-LM's sequence parallelism (Korthikanti et al. 2022, section 4.2.2), by hand."""
    collectives = lowered(model, 4).collectives
    over_tp = [c for c in collectives if c.axes == ("tp",)]
    # Forward: a gather and a scatter per block; backward: both again, but no gradient of x is asked for.
    kinds = [c.kind for c in over_tp]
    assert kinds.count("all_gather") == 2 * blocks and kinds.count("psum_scatter") == 2 * blocks - 1
    assert sum(c.bytes for c in over_tp) == (4 * blocks - 1) * gathered(4)
    weights = sum(torch.Size(s).numel() for s in args(model, 4)[0].values()) // 4
    (gradients,) = [c for c in collectives if c.axes == ("dp",)]
    assert gradients.kind == "all_reduce" and gradients.bytes == weights * 4


def test_parameters_are_gathered_where_they_are_smaller() -> None:
    """Their gather twice or once, and their gradients' scatter: full sharding over tp."""
    collectives = lowered(mlp, 64).collectives
    weights = 2 * WIDTH * HIDDEN * 4
    over_tp = sum(c.bytes for c in collectives if c.axes == ("tp",))
    assert over_tp <= weights * 3 * 3 // 4 < 3 * gathered(64)


@pytest.mark.parametrize(("model", "batch"), [(layer, 4), (mlp, 64)])
def test_equals_one_device(model: Callable[..., torch.Tensor], batch: int) -> None:
    shapes, specs, inputs = args(model, batch)
    generator = torch.Generator().manual_seed(batch)
    params = {n: torch.randn(s, generator=generator) / 4 for n, s in shapes.items()}
    data = [torch.randn(s, generator=generator) for s in inputs]

    def loss(p: Tree, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(p, x) - y).square().mean()

    run = shard(loss, MESH, (specs, BY_POSITION, BY_POSITION))
    equal(run, loss, params, *data, orders=["value", "gradient"])
