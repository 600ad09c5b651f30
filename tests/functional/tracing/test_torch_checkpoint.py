"""torch.utils.checkpoint inside a traced function is a segment, as of torchard.checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from any_size import fuse
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, jvp, vmap
from torch.utils import checkpoint as torchs

from torchard import Mesh, P, checkpoint, jit, scope, shard, trace
from torchard.functional.core.errors import CheckpointError

Fn = Callable[..., Any]
X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)
WS = [torch.linspace(-0.5, 0.4 + i / 9, 64, dtype=torch.float64).reshape(8, 8) for i in range(3)]


def theirs(fn: Fn, reentrant: bool = False) -> Fn:
    return lambda *args: torchs.checkpoint(fn, *args, use_reentrant=reentrant)


# How a program writes a checkpoint of torch's, and what it is of ours.
WAYS: dict[str, Fn] = {
    "by hooks": theirs,
    "reentrant": lambda fn: theirs(fn, True),
}


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).sin()


def program(seed: int, segment: Callable[[Fn], Fn]) -> Fn:
    """Layers, some of them segments, some segments in others, some in scopes or of other transforms."""
    rng = Random(seed)
    kinds = [rng.choice(["plain", "segment", "nested", "fused", "scope"]) for _ in WS]

    def nested(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return segment(layer)(layer(x, w), w).cos()

    def fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fuse(layer)(x, w).cos()

    def scoped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with scope("inner"):
            return layer(x, w).exp()

    bodies = {"nested": nested, "fused": fused, "scope": scoped}

    def run(x: torch.Tensor, ws: list[torch.Tensor]) -> torch.Tensor:
        for kind, w in zip(kinds, ws, strict=True):
            x = layer(x, w) if kind == "plain" else segment(bodies.get(kind, layer))(x, w)
        return x.square().sum()

    return run


MESH = Mesh({"dp": 2}, virtual=True)


def compiled(fn: Fn) -> Any:
    return jit(fn, backend="eager")


# What is lowered, and what it gives.
STACKS: dict[str, Callable[[Fn], tuple[int, Any]]] = {
    "gradient outside": lambda f: (compiled(f).lower_joint(X, WS).peak, grad(compiled(f), 1)(X, WS)),
    "gradient inside": lambda f: (
        compiled(grad(f, 1)).lower(X, WS).peak,
        compiled(grad(f, 1))(X, WS),
    ),
    "sharded": lambda f: (
        shard(f, MESH, (P("dp"), None)).lower_joint(X, WS).peak,
        grad(shard(f, MESH, (P("dp"), None)), 1)(X, WS),
    ),
    "sharded gradient": lambda f: (
        shard(grad(f, 1), MESH, (P("dp"), None), P()).lower(X, WS).peak,
        shard(grad(f, 1), MESH, (P("dp"), None), P())(X, WS),
    ),
    "batched gradients": lambda f: (
        compiled(vmap(grad(f, 1), (0, None))).lower(X[:, None], WS).peak,
        compiled(vmap(grad(f, 1), (0, None)))(X[:, None], WS),
    ),
    "forward mode": lambda f: (0, [compiled(lambda x: jvp(lambda x: f(x, WS), (x,), (x,))[1])(X)]),
}


@pytest.mark.sampled(2)
@settings(max_examples=examples(1, 40))
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stack", STACKS)
def test_keeps_what_torchard_s_own_keeps(way: str, stack: str, seed: int) -> None:
    peak, values = STACKS[stack](program(seed, WAYS[way]))
    own, same = STACKS[stack](program(seed, checkpoint))
    assert peak == own
    for mine, plain in zip(values, same, strict=True):
        assert torch.equal(mine, plain)
    _, without = STACKS[stack](program(seed, lambda fn: fn))
    for mine, plain in zip(values, without, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)


def test_a_policy_by_torch_s_modes_is_refused() -> None:
    def contexts() -> Any:
        return torchs.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    fn = lambda x: torchs.checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts)  # noqa: E731
    with pytest.raises(CheckpointError, match=r"_checkpoint\.py:\d+ in <lambda> calls .*policy="):
        trace(fn)(X)
    assert torch.equal(fn(X), X.sin())


def test_torch_s_own_is_there_again_and_for_other_threads() -> None:
    before = torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator
    runs: list[str] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        runs.append(threading.current_thread().name)
        return x.sin().exp()

    def elsewhere() -> None:
        for reentrant in (False, True):
            x = X.clone().requires_grad_()
            theirs(counted, reentrant)(x).sum().backward()
            torch.testing.assert_close(x.grad, X.cos() * X.sin().exp())

    def traced(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=elsewhere, name="other")
        other.start()
        other.join()
        return theirs(counted)(x)

    trace(traced)(X)
    assert runs == ["other"] * 4 + [threading.current_thread().name]
    assert before == (torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator)
    with pytest.raises(ZeroDivisionError):
        trace(theirs(lambda x: x / (1 // 0)))(X)
    assert before == (torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator)
