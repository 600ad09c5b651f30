"""Sums over real ranks, whole and scattered, of several values by one call: what `gloo.py` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from collective_counts import Counter

from torchard import Mesh, MeshTensor, P, place, repeat, shard

__all__ = ["CHECKS", "as_local"]

Params = dict[str, Any]

# The split dim of each parameter: shards of equal and of different sizes, dims that come first and last.
SPLITS = {"w": P(None, "dp"), "odd": P("dp"), "bias": P("dp"), "one": P("dp"), "out": P("dp", None)}
SHAPES = {"w": (6, 7), "odd": (5, 6), "bias": (6,), "one": (1,), "out": (7, 6)}


def _layer(p: Params, x: torch.Tensor) -> torch.Tensor:
    hidden = (x @ p["out"].T + p["one"]) @ p["w"].T
    return (hidden + p["bias"] + x @ p["odd"].T @ p["odd"]) / 8


def _loss(layers: list[Params], x: torch.Tensor) -> torch.Tensor:
    for p in layers:
        x = _layer(p, x)
    return (x * x.conj()).real.sum().float()


def _in_a_loop(stacked: Params, x: torch.Tensor) -> torch.Tensor:
    x = repeat(_layer, stacked, x)
    return (x * x.conj()).real.sum().float()


def scatters_of_layers(rank: int, world: int) -> dict[str, tuple[float, int]]:
    """Of each dtype, unrolled and in a loop: the error, and the number of scatters of two layers."""
    mesh, found = Mesh({"dp": world}), {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64):
        seed = torch.Generator().manual_seed(3)
        layers = [
            {k: torch.randn(s, dtype=dtype, generator=seed) for k, s in SHAPES.items()}
            for _ in range(2)
        ]
        x = torch.randn(2 * world + 1, 6, dtype=dtype, generator=seed)
        stacked = {k: torch.stack([layer[k] for layer in layers]) for k in SHAPES}
        behind = {k: P(None, *spec) for k, spec in SPLITS.items()}
        cases: list[tuple[str, Callable[..., Any], Any, Any]] = [
            ("layers", _loss, layers, [SPLITS, SPLITS]),
            ("loop", _in_a_loop, stacked, behind),
        ]
        for name, loss, params, specs in cases:
            run = shard(torch.func.grad(loss), mesh, out_specs=specs)
            placed = place(params, mesh, specs), place(x, mesh, P("dp"))
            have, want = run(*placed), torch.func.grad(loss)(params, x)
            error = max(
                float((a.full() - b).abs().max() / b.abs().max())
                for a, b in zip(_leaves(have), _leaves(want), strict=True)
            )
            sent = run.lower(*placed).collectives
            calls = sum(c.times for c in sent if c.kind == "psum_scatter")
            found[f"{name} {dtype}"] = error, calls
    return found


# Elements of each of two float32 sums; of the last two, two ranks exchange the former.
SUMMED = (0, 1, 1001, 2**17, 2**17 + 1)


def sums_of_few_bytes(rank: int, world: int) -> list[tuple[bool, dict[str, int]]]:
    """For each size, whether sums are exact and equal on all ranks, and the collectives that run."""
    mesh, found = Mesh({"dp": world}), []
    run = shard(lambda x, y: ((x - y).sum(0), y.sum(0)), mesh, in_specs=P("dp"), out_specs=P())
    for size in SUMMED:
        x = torch.arange(world * size, dtype=torch.float32).reshape(world, size) % 251
        y = x.flip(1) * 3
        run(x, y)
        with Counter() as count:
            have = [as_local(value) for value in run(x, y)]
        want = (x - y).sum(0), y.sum(0)
        found.append((all(map(torch.equal, have, want)), count.counts))
    return found


def as_local(value: Any) -> torch.Tensor:
    """What this rank has of a value of which all have the same."""
    local: torch.Tensor = value.local if isinstance(value, MeshTensor) else value
    return local


def _leaves(tree: Any) -> list[Any]:
    """The values of a dictionary, or of a list of them."""
    return [v for part in (tree if isinstance(tree, list) else [tree]) for v in part.values()]


CHECKS = {"scatters_of_layers": scatters_of_layers, "sums_of_few_bytes": sums_of_few_bytes}
