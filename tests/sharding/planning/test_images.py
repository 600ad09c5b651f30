"""Plans for networks on split images keep their axes, whatever is between the layers.

Judged by what an expert would write: the same network with a constraint behind every layer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from effort import examples
from paths import BENCHMARKS
from torch import Tensor

from torchard import Mesh, MeshTensor, P, place, shard

sys.path.append(str(BENCHMARKS))

import images

CI = examples(ci=1, explore=0) == 1
Function = Callable[[Any, Tensor], Tensor]


FEW = [
    ("convolutions", 3, "lines", True),
    ("convolutions", 3, "channels", False),
    ("U-Net", 3, "lines, columns", False),
    ("U-Net, max pools, transposed", 3, "lines", False),
]
ALL = [(n, k, s, g) for n in images.NETS for k in (2, 4) for s in images.SPLITS for g in (False, True)]


@pytest.mark.parametrize(("name", "levels", "split", "gradients"), FEW if CI else ALL)
def test_plans_are_as_good_as_constrained_ones(
    name: str, levels: int, split: str, gradients: bool
) -> None:
    net = images.NETS[name](levels, 32)
    free, pinned = (
        images.cost(net, split, pinned=p, gradients=gradients) for p in (False, True)
    )
    sent, peak, flops = images.worse(free, pinned)
    assert max(sent, flops) <= 1.05, (free, pinned)
    # A plan that sends half may hold the larger buffers of fewer collectives: 1.24 here for channels.
    assert peak <= (1.25 if sent < 0.5 else 1.05), (free, pinned)


# -- networks of any kind ---------------------------------------------------------------------------

LINES = {
    "lines": ({"sp": 2}, P(None, None, "sp")),
    "uneven lines": ({"sp": 3}, P(None, None, "sp")),
    "lines, columns": ({"a": 2, "b": 2}, P(None, None, "a", "b")),
    "channels": ({"tp": 2}, P(None, "tp")),
    "batch, lines": ({"dp": 2, "sp": 2}, P("dp", None, "sp")),
}


def weight(rng: random.Random, *shape: int) -> Tensor:
    made = torch.Generator().manual_seed(rng.randrange(10**6))
    return torch.randn(shape, generator=made, dtype=torch.float64)


def norm(rng: random.Random) -> tuple[list[Tensor], Function]:
    params = [weight(rng, 4), weight(rng, 4)]
    if rng.random() < 0.5:
        return params, lambda p, x: F.group_norm(x, 2, *p)
    return params, lambda p, x: F.batch_norm(x, None, None, *p, training=True)


def convolution(rng: random.Random) -> tuple[list[Tensor], Function]:
    kernel, groups = rng.choice([1, 2, 3]), rng.choice([1, 2])
    dilation, stride = rng.choice([1, 1, 2]), rng.choice([1, 1, 2])
    how = {"padding": rng.choice([0, 1, 2]), "dilation": dilation, "stride": stride, "groups": groups}
    params = [weight(rng, 4, 4 // groups, kernel, kernel), weight(rng, 4)]
    return params, lambda p, x: F.conv2d(x, *p, **how)


def transposed(rng: random.Random) -> tuple[list[Tensor], Function]:
    kernel, groups, stride = rng.choice([1, 2, 3, 4]), rng.choice([1, 2]), rng.choice([1, 2, 2, 3])
    how = {"padding": rng.choice([0, 1]), "stride": stride, "groups": groups}
    how["output_padding"] = rng.randrange(stride)
    params = [weight(rng, 4, 4 // groups, kernel, kernel), weight(rng, 4)]
    return params, lambda p, x: F.conv_transpose2d(x, *p, **how)


def resized(rng: random.Random) -> tuple[list[Tensor], Function]:
    return [], rng.choice(
        [
            lambda p, x: F.max_pool2d(x, 2),
            lambda p, x: F.avg_pool2d(x, 2),
            lambda p, x: F.max_pool2d(x, 3, 1, padding=1),
            lambda p, x: F.interpolate(x, scale_factor=2, mode="nearest"),
            lambda p, x: F.interpolate(x, scale_factor=2, mode="bilinear"),
            lambda p, x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        ]
    )


def joined(rng: random.Random) -> tuple[list[Tensor], Function]:
    params = [weight(rng, 4, 8, 3, 3)]
    return params, lambda p, x: F.conv2d(torch.cat([x, x.tanh()], 1), *p, padding=1)


LAYERS = (norm, convolution, convolution, transposed, resized, joined)


def network(rng: random.Random, x: Tensor) -> tuple[list[Any], Function]:
    """Some layers that can follow one another, and a loss to which every element adds in its own way."""
    steps: list[tuple[list[Tensor], Function]] = []
    while len(steps) < 3:
        params, fn = rng.choice(LAYERS)(rng)
        try:
            made = fn(params, x)
        except RuntimeError:
            continue  # nothing is left of the image
        if min(made.shape[2:]) >= 2 and max(made.shape[2:]) <= 24:
            x = made
            steps.append((params, fn))

    def loss(params: Any, x: Tensor) -> Tensor:
        for (_, fn), each in zip(steps, params, strict=True):
            x = x + F.silu(fn(each, x)) if fn(each, x).shape == x.shape else fn(each, x)
        return (x.sin() * torch.arange(x.numel()).reshape(x.shape)).sum()

    return [params for params, _ in steps], loss


@pytest.mark.parametrize("seed", range(examples(ci=5, explore=300)))
def test_gradients_equal_one_device(seed: int) -> None:
    rng = random.Random(seed)
    axes, spec = rng.choice(list(LINES.values()))
    x = weight(rng, 2, 4, rng.choice([8, 12, 13]), 8)
    params, loss = network(rng, x)
    mesh, gradient = Mesh(axes, virtual=True), torch.func.grad(loss, argnums=(0, 1))
    have, want = shard(gradient, mesh)(params, place(x, mesh, spec)), gradient(params, x)
    for a, b in zip(optree.tree_leaves(have), optree.tree_leaves(want), strict=True):
        whole = a.full() if isinstance(a, MeshTensor) else a
        torch.testing.assert_close(whole, b, rtol=0, atol=1e-10 * float(b.abs().max()) + 1e-12)
