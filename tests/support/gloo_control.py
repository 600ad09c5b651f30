"""Loops and branches on real ranks, by conditions of data that is split: what `gloo.py` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad

from torchard import (
    CheckError,
    Mesh,
    P,
    associative_scan,
    checked,
    cond,
    debug,
    error_if,
    fori_loop,
    full,
    place,
    shard,
    tree,
    while_loop,
)

__all__ = ["CHECKS"]


def _shrunk(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Until the norm of all rows is small; a branch has a product whose sum is completed over ranks."""

    def body(carry: Any) -> Any:
        x, n = carry
        mixed = cond(n % 2 == 0, lambda: x * (x.T @ x).tanh().sum() / 99, lambda: x.sin())
        return torch.tanh(mixed @ w), n + 1

    x, n = while_loop(lambda carry: carry[0].norm() > 0.01, body, (x, 0), 9)
    return x, n


def _loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _shrunk(w, x)[0].square().sum()


def loops_and_branches(rank: int, world: int) -> dict[str, Any]:
    """The largest errors of values and gradients, and the number of iterations, here and alone."""
    mesh, seed = Mesh({"dp": world}), torch.Generator().manual_seed(5)
    w = torch.randn(4, 4, generator=seed, dtype=torch.float64) / 1.5
    x = torch.randn(3 * world + 1, 4, generator=seed, dtype=torch.float64)
    placed = place(w, mesh, P()), place(x, mesh, P("dp"))
    have, want = tree.map(full, shard(_shrunk, mesh)(*placed)), _shrunk(w, x)
    slopes = full(shard(grad(_loss), mesh)(*placed))
    return {
        "value": float((have[0] - want[0]).abs().max()),
        "gradient": float((slopes - grad(_loss)(w, x)).abs().max()),
        "steps": (int(have[1]), int(want[1])),
    }


def effects(rank: int, world: int) -> dict[str, Any]:
    """What was seen here and alone, in a forward and in a gradient."""
    seen: list[tuple[str, float]] = []

    def see(what: str, value: torch.Tensor) -> torch.Tensor:
        debug.callback(lambda value: seen.append((what, round(float(value), 6))), value)
        return value

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        def body(i: Any, h: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(h @ w)
            see("norm", h.norm())
            return cond(h.sum() > 0, lambda h: h + see("max", h.max()), lambda h: h * 2, h)

        return see("loss", fori_loop(0, 3, body, x).square().mean())

    def transcript(fn: Callable[..., Any], *args: Any) -> list[tuple[str, float]]:
        seen.clear()
        fn(*args)
        return list(seen)

    mesh, seed = Mesh({"dp": world}), torch.Generator().manual_seed(5)
    w = torch.randn(4, 4, generator=seed, dtype=torch.float64)
    x = torch.randn(3 * world + 1, 4, generator=seed, dtype=torch.float64)
    placed = place(w, mesh, P()), place(x, mesh, P("dp"))
    ways = (lambda fn: fn), grad
    return {
        "alone": [transcript(way(loss), w, x) for way in ways],
        "sharded": [transcript(way(shard(loss, mesh)), *placed) for way in ways],
        "inside": [transcript(shard(way(loss), mesh), *placed) for way in ways],
    }


def scans(rank: int, world: int) -> dict[str, Any]:
    """The largest errors of a scan along a split dim, and of its gradient."""

    def affine(f: Any, g: Any) -> Any:
        return f[0] * g[0], f[1] * g[0] + g[1]

    def states(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return associative_scan(affine, (a, b), 0, True)[1]

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return states(a, b).square().sum()

    mesh, seed = Mesh({"sp": world}), torch.Generator().manual_seed(5)
    a, b = torch.rand(2, 5 * world + 1, 3, generator=seed, dtype=torch.float64)
    placed = [place(x, mesh, P("sp")) for x in (a, b)]
    value, slopes = full(shard(states, mesh)(*placed)), full(shard(grad(loss), mesh)(*placed))
    return {
        "value": float((value - states(a, b)).abs().max()),
        "gradient": float((slopes - grad(loss)(a, b)).abs().max()),
    }


def wrong_values(rank: int, world: int) -> dict[str, str]:
    """What this rank is told of a value that is wrong on the last rank, and of a condition of all."""
    mesh = Mesh({"dp": world})
    x = place(torch.arange(2.0 * world).flip(0), mesh, P("dp"))

    def logarithm(x: torch.Tensor) -> torch.Tensor:
        return (x - 1).log()

    def asked(x: torch.Tensor) -> torch.Tensor:
        error_if(x < 1, "the least of {x} is below 1", x=x.amin())
        return x.exp()

    def told(fn: Callable[..., Any]) -> str:
        try:
            fn(x)
        except CheckError as error:
            return str(error)
        return ""

    return {"checked": told(checked(shard(logarithm, mesh))), "asked": told(shard(asked, mesh))}


CHECKS: dict[str, Callable[[int, int], Any]] = {
    "loops_and_branches": loops_and_branches,
    "effects": effects,
    "scans": scans,
    "wrong_values": wrong_values,
}
