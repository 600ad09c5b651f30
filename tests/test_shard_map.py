"""shard_map against plain torch, rank by rank: values, both derivatives, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run
from torch.func import jvp, vjp

import torchard
from torchard import Mesh, MeshTensor, P, shard_map

AXES = ["x", "y", ("x", "y"), ("y", "x")]


def rotation(c: Any, axes: Any) -> list[tuple[int, int]]:
    n = c.axis_size(axes)
    return [(i, (i + 1) % n) for i in range(n - 1)]  # the last rank sends nothing: zeros arrive


# By name: the function of a [2m, 2n]-or-larger shard and a [1, 1] weight, and whether what it gives
# still varies over the axes. Every dim divides by the number of ranks.
COLLECTIVES: dict[str, tuple[Callable[..., Any], bool]] = {
    "psum": (lambda c, a, x, w: c.psum(x, a), False),
    "pmean": (lambda c, a, x, w: c.pmean(x, a), False),
    "pmax": (lambda c, a, x, w: c.pmax(x.detach(), a) + c.psum(x, a), False),
    "pmin": (lambda c, a, x, w: c.pmin(x.detach(), a) + c.psum(x, a), False),
    "pvary": (lambda c, a, x, w: c.pvary(w, a) * x, True),
    "all_gather": (lambda c, a, x, w: c.all_gather(x, a)[0] * x, True),
    "all_gather 1": (lambda c, a, x, w: c.all_gather(x, a, dim=1).sum(1) * x, True),
    "all_gather tiled": (lambda c, a, x, w: c.all_gather(x, a, dim=1, tiled=True), True),
    "all_gather invariant": (
        lambda c, a, x, w: c.all_gather(x, a, dim=1, tiled=True, invariant=True).cos() * w,
        False,
    ),
    "psum_scatter tiled": (lambda c, a, x, w: c.psum_scatter(x, a, dim=1, tiled=True), True),
    "psum_scatter": (
        lambda c, a, x, w: c.psum_scatter(x.unflatten(0, (c.axis_size(a), -1)), a),
        True,
    ),
    "all_to_all tiled": (
        lambda c, a, x, w: c.all_to_all(x, a, split_dim=1, concat_dim=0, tiled=True),
        True,
    ),
    "all_to_all one dim": (
        lambda c, a, x, w: c.all_to_all(x, a, split_dim=0, concat_dim=0, tiled=True) * x,
        True,
    ),
    "all_to_all": (
        lambda c, a, x, w: c.all_to_all(
            x.unflatten(1, (c.axis_size(a), -1)), a, split_dim=1, concat_dim=2
        ),
        True,
    ),
    "ppermute": (lambda c, a, x, w: c.ppermute(x, a, rotation(c, a)) * x, True),
    "axis_index": (lambda c, a, x, w: x * (c.axis_index(a) + 1), True),
    "none": (lambda c, a, x, w: x.cumsum(0), True),
}


def cases() -> list[Any]:
    """Every collective over x on every mesh; over other axes those that differ by kind of step."""
    meshes = [
        ({"x": 2}, [P("x")]),
        ({"x": 3}, [P(None, "x")]),
        ({"x": 2, "y": 2}, [P("x", "y"), P(None, ("x", "y"))]),
    ]
    found = []
    for axes, specs in meshes:
        overs = [a for a in AXES if set((a,) if isinstance(a, str) else a) <= set(axes)]
        for spec, over, name in itertools.product(specs, overs, COLLECTIVES):
            several = name in ("psum", "all_gather tiled", "all_to_all", "ppermute")
            if (over == "x" and spec == specs[0]) or (several and over != "x"):
                label = "".join(over)
                ident = f"{name} {label}-{'×'.join(map(str, axes.values()))}-{spec}"
                found.append(pytest.param(axes, spec, over, name, id=ident))
    return found


def directional(f: Callable[..., Any], args: Any, tangents: Any) -> torch.Tensor:
    """Forward derivative by two backward ones: the transpose of the transpose."""
    y = f(*args)
    u = torch.zeros_like(y, requires_grad=True)
    pulled = torch.autograd.grad(y, args, u, create_graph=True)
    total = sum((g * t).sum() for g, t in zip(pulled, tangents, strict=True))
    return torch.autograd.grad(total, u)[0]


def full(value: Any) -> Any:
    return value.full() if isinstance(value, MeshTensor) else value


@pytest.mark.parametrize(("axes", "spec", "over", "name"), cases())
def test_collective(axes: dict[str, int], spec: P, over: Any, name: str) -> None:
    fn, varies = COLLECTIVES[name]
    left = set(spec.axes) - (set() if varies else {over} if isinstance(over, str) else set(over))
    out_spec = P(tuple(sorted(left)) or None)
    specs = (spec, P())

    def body(c: Any, x: Any, w: Any) -> Any:
        return fn(c, over, torch.tanh(x * w), w).sin()

    n = {2: 8, 3: 18, 4: 32}[int(torch.tensor(list(axes.values())).prod())]
    x = torch.randn(n, n, dtype=torch.float64, requires_grad=True)
    w = torch.rand(1, 1, dtype=torch.float64, requires_grad=True)
    mapped = shard_map(lambda x, w: body(torchard, x, w), Mesh(axes, virtual=True), specs, out_spec)

    def whole(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return full(mapped(x, w))

    def reference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return run(body, axes, specs, out_spec, x, w)

    want = reference(x, w)
    close(whole(x, w), want)
    ct = torch.randn_like(want)
    expected = torch.autograd.grad(want, (x, w), ct)
    have, pull = vjp(whole, x, w)
    close(have, want)
    for a, b in zip(pull(ct), expected, strict=True):
        close(a, b)
    tangents = (torch.randn_like(x), torch.randn_like(w))
    close(jvp(whole, (x, w), tangents)[1], directional(reference, (x, w), tangents))


def close(have: torch.Tensor, want: torch.Tensor) -> None:
    assert have.shape == want.shape
    assert have.dtype == want.dtype
    assert (have - want).abs().max() <= 1e-12 * want.abs().max().clamp(min=1.0)
