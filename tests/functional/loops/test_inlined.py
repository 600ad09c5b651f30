"""Transforms inside of a traced function: their loops stay loops, under every outer derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from torch.func import grad, jvp, vmap

from torchard import Mesh, P, checkpoint, constrain, jit, nn, policies, repeat, scope, shard
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import LOOP, SCOPE, SEGMENTS
from torchard.functional.programs.unrolled import has_loops, unrolled
from torchard.testing import equal

COUNT, F64 = 4, torch.float64
generator = torch.Generator().manual_seed(0)
PARAMS = {
    "up": torch.randn(COUNT, 6, 4, generator=generator, dtype=F64) / 2,
    "bias": torch.randn(COUNT, 6, generator=generator, dtype=F64),
    "down": torch.randn(COUNT, 4, 6, generator=generator, dtype=F64) / 2,
}
X = torch.randn(2, 4, generator=generator, dtype=F64)
MESH = Mesh({"tp": 2}, virtual=True)


def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    with scope("mlp"):
        hidden = nn.gelu(nn.linear(x, p["up"], p["bias"]))
        return x + nn.linear(hidden, p["down"])


def repeated(p: Any, x: torch.Tensor) -> torch.Tensor:
    with scope("model"):
        return repeat(layer, p, x).square().sum()


def looped(p: Any, x: torch.Tensor) -> torch.Tensor:
    for i in range(COUNT):
        x = layer({k: v[i] for k, v in p.items()}, x)
    return x.square().sum()


def constrained_inside(p: Any, x: torch.Tensor) -> torch.Tensor:
    return repeat(lambda p, x: constrain(layer(p, x), P("tp")), p, x).square().sum()


SPECS = {"up": P(None, "tp"), "bias": P(None, "tp"), "down": P(None, None, "tp")}
INNER: dict[str, Callable[[], Any]] = {
    "jit": lambda: jit(repeated, backend="eager"),
    "checkpoint": lambda: checkpoint(repeated),
    "checkpoint of blocks": lambda: checkpoint(repeated, where="model/block/*"),
    "checkpoint of a scope in blocks": lambda: checkpoint(repeated, where="*/mlp"),
    "checkpoint of what is around": lambda: checkpoint(repeated, where="model"),
    "budget": lambda: checkpoint(repeated, policy=policies.budget(fraction=0.5)),
    "fuse": lambda: fuse(repeated),
    "fuse in a scope": lambda: fuse(repeated, where="model/block/*"),
    "shard": lambda: shard(repeated, MESH, in_specs=(SPECS, None)),
    "shard of constraints": lambda: shard(constrained_inside, MESH),
    "all": lambda: fuse(checkpoint(shard(repeated, MESH, in_specs=(SPECS, None)), where="*/mlp")),
}
OUTER: dict[str, Callable[[Any], Any]] = {
    "value": lambda f: f,
    "gradient": lambda f: grad(f, (0, 1)),
    "hessian's product": lambda f: grad(lambda p, x: grad(f, 1)(p, x).square().sum()),
    "tangent": lambda f: lambda p, x: jvp(f, (p, x), (p, x)),
    "gradients of a batch": lambda f: vmap(grad(f), (None, 0)),
}


def looping(program: Program) -> bool:
    return any(LOOP.on(node) for node in program.calls)


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("inner", INNER)
def test_loops_stay_and_values_are_right(inner: str, outer: str) -> None:
    x = X[None] if outer == "gradients of a batch" else X
    derived = OUTER[outer](INNER[inner]())
    run = jit(lambda p, x: derived(p, x), backend="eager")
    equal(run, OUTER[outer](looped), PARAMS, x, orders=("value",))
    assert has_loops(run.lower(PARAMS, x))


@pytest.mark.parametrize("where", ["model/block/*", "*/mlp", "model"])
def test_segments_are_those_of_a_checkpoint_outside(where: Any) -> None:
    """A checkpoint marks the same operations whether it is inlined, with its loop, or outermost."""
    loss = checkpoint(repeated, where=where, policy=policies.save_dots)
    step = lambda of: lambda p, x: grad(of)(p, x)  # noqa: E731  (on one line, which residuals name)
    inside = jit(step(loss), backend="eager").lower(PARAMS, X)
    expected = checkpoint(step(repeated), where=where, policy=policies.save_dots).lower(PARAMS, X)

    def segments(program: Program) -> list[str]:
        return [" ".join(map(str, SEGMENTS.get(node, ()))) for node in program.calls]

    assert any(map(looping, (inside, expected)))
    assert inside.residuals.bytes == expected.residuals.bytes
    assert str(inside.residuals) == str(expected.residuals)
    assert set(segments(inside)) == set(segments(expected))


def test_kernels_are_fused_once() -> None:
    step = lambda of: lambda p, x: grad(of)(p, x)  # noqa: E731
    fused = jit(step(fuse(repeated, where="model/block/*")), backend="eager").lower(PARAMS, X)
    alone = fuse(step(repeated), where="model/block/*").lower(PARAMS, X)
    assert str(fused.kernels) == str(alone.kernels)
    assert len(fused.kernels) > 0


def nested(p: Any, x: torch.Tensor) -> torch.Tensor:
    def outer(p: Any, x: torch.Tensor) -> torch.Tensor:
        inner = {name: torch.stack([leaf, leaf / 2]) for name, leaf in p.items()}
        return repeat(layer, inner, x, name="in")

    return repeat(outer, p, x, name="out").square().sum()


def nested_loops(p: Any, x: torch.Tensor) -> torch.Tensor:
    for i in range(COUNT):
        with scope(f"out/{i}"):
            for j in range(2):
                with scope(f"in/{j}"):
                    x = layer({k: torch.stack([v[i], v[i] / 2])[j] for k, v in p.items()}, x)
    return x.square().sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["out/*", "*/mlp"])
@pytest.mark.parametrize("outside", [False, True])
def test_segments_of_loops_in_loops(where: str, outside: bool) -> None:
    """Each entry of a scope is a segment, and its numbers are those of its own loops."""

    def step(fn: Any) -> Any:
        if outside:
            return checkpoint(grad(fn), where=where)
        return jit(grad(checkpoint(fn, where=where)), backend="eager")

    have, want = (step(fn).lower(PARAMS, X) for fn in (nested, nested_loops))
    assert have.residuals.bytes <= want.residuals.bytes < step_bytes(nested_loops)
    scopes = {SCOPE.get(node) for node in unrolled(have).calls}
    assert {f"out/{i}/in/{j}/mlp" for i in range(COUNT) for j in range(2)} <= scopes
    equal(step(nested), grad(nested_loops), PARAMS, X, orders=("value",))


def step_bytes(fn: Any) -> int:
    """What the gradient keeps without a checkpoint."""
    return jit(grad(fn), backend="eager").lower(PARAMS, X).residuals.bytes
