"""Concatenations with operands that have no elements, in every transform.

torch accepts a tensor of shape [0] beside operands of any rank: caches of decoders begin so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from torch.func import grad, jvp, vmap

from torchard import Mesh, MeshTensor, P, accumulate, checkpoint, pipeline, place, shard

MESH = Mesh({"dp": 2}, virtual=True)
X = torch.randn(4, 2, 6, 4, generator=torch.Generator().manual_seed(0))
SPECS = (P("dp"), P(None, None, "dp"), P(None, None, None, "dp"), P())

Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "first": lambda x: torch.cat([x.new_zeros(0), x], -2),
    "last": lambda x: torch.concat([x, x.new_zeros(0)], -1).transpose(1, 2),
    "several": lambda x: torch.cat([x.new_zeros(0), x, x.new_zeros(0), x], 0),
    "of rows": lambda x: torch.cat([x.new_zeros(0), x[:, :, :1], x.new_zeros(0)], 2),
    "computed": lambda x: torch.cat([x.flatten()[:0] * 2, x * 2], -1),
    "empty slice": lambda x: torch.cat([x[:, :0], x], 1),
    "of the batch": lambda x: torch.cat([x[:0], x], 0),
    "another dtype": lambda x: torch.cat([torch.tensor([], dtype=torch.float64), x], 0),
    "of integers": lambda x: torch.cat([torch.tensor([]), x.long()], 0) + x,
    "flat": lambda x: torch.cat([x.new_zeros(0), x.flatten()]),
    "all empty": lambda x: torch.cat([x.new_zeros(0), x.new_zeros(0)]).sum() + x.sin(),
    "one": lambda x: torch.cat([x.new_zeros(0)]).sum() + x,
    "hstack": lambda x: torch.hstack([x.new_zeros(0), x.flatten()]),
    "vstack": lambda x: torch.vstack([x[:0], x]),
    "dstack": lambda x: torch.dstack([x[:, :, :0], x]),
    "stack": lambda x: torch.stack([x.new_zeros(0), x.new_zeros(0)]).sum() + x,
}


def _loss(fn: Function) -> Function:
    return lambda x: fn(x).sin().sum()


def _tangent(fn: Function) -> Function:
    return lambda x: jvp(fn, (x,), (x,))[1]


# Ways to transform a function, each equal to the second function, of an argument that the first takes.
WAYS: dict[str, tuple[Callable[[Function], Function], Callable[[Function], Function]]] = {
    "shard": (lambda fn: shard(fn, MESH), lambda fn: fn),
    "shard(grad)": (lambda fn: shard(grad(_loss(fn)), MESH), lambda fn: grad(_loss(fn))),
    "grad(shard)": (lambda fn: grad(shard(_loss(fn), MESH)), lambda fn: grad(_loss(fn))),
    "shard(vmap)": (lambda fn: shard(vmap(fn), MESH), vmap),
    "shard(jvp)": (lambda fn: shard(_tangent(fn), MESH), _tangent),
    "fuse(shard)": (lambda fn: fuse(shard(fn, MESH)), lambda fn: fn),
    "checkpoint(shard)": (
        lambda fn: grad(checkpoint(shard(_loss(fn), MESH))),
        lambda fn: grad(_loss(fn)),
    ),
    "accumulate": (lambda fn: accumulate(fn, 2, batch=0), lambda fn: fn),
    "accumulate(grad)": (
        lambda fn: accumulate(grad(_loss(fn)), 2, batch=0),
        lambda fn: grad(_loss(fn)),
    ),
    "pipeline(grad)": (
        lambda fn: pipeline(grad(lambda x: _loss(fn)(x.tanh())), MESH, "dp", microbatches=2, batch=0),
        lambda fn: grad(lambda x: _loss(fn)(x.tanh())),
    ),
}


def _check(name: str, way: str, spec: P) -> None:
    have, want = WAYS[way]
    try:
        expected = want(FUNCTIONS[name])(X)
    except (RuntimeError, ValueError, IndexError):
        return  # torch itself has no such call, as for a gradient of integers
    placed: Any = X if way.startswith(("accumulate", "pipeline")) else place(X, MESH, spec)
    found: Any = have(FUNCTIONS[name])(placed)
    found = found.full() if isinstance(found, MeshTensor) else found
    torch.testing.assert_close(found, expected, msg=lambda text: f"{name}, {way}, {spec}: {text}")


@pytest.mark.parametrize("way", WAYS)
def test_operands_without_elements_change_nothing(way: str) -> None:
    generator = random.Random(way)
    for name in FUNCTIONS:
        _check(name, way, generator.choice(SPECS))


def test_an_empty_operand_moves_nothing() -> None:
    run = shard(FUNCTIONS["first"], MESH)
    assert not run.lower(place(X, MESH, P("dp"))).collectives
