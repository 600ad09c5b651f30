"""Training with everything taken for large: by blocks, compiled, in memory that is used again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor

from torchard import jit
from torchard.functional.core.bounded import Recent
from torchard.functional.execution.binding import bind
from torchard.kernels.execution import autotune as choice
from torchard.kernels.execution import blocked, buffers
from torchard.kernels.execution.pool import Pool

N, D, H, V = 12, 8, 16, 24
Params = dict[str, Tensor]


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(choice, "_SMALL", 1)
    monkeypatch.setattr(choice, "_CHOSEN", Recent(512))
    monkeypatch.setattr(blocked, "BLOCK", 3 * D)
    monkeypatch.setattr(buffers, "LARGE", 1)
    monkeypatch.setattr(buffers, "_pool", Pool(1 << 20))
    yield
    torch.set_num_threads(threads)


def drawn(seed: int = 0) -> tuple[Params, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"norm": (D,), "up": (D, H), "b": (H,), "down": (H, D), "head": (D, V), "gate": (D, H)}
    params = {
        k: torch.randn(s, generator=draw, dtype=torch.float64) * 0.3 for k, s in shapes.items()
    }
    x = torch.randn(N, D, generator=draw, dtype=torch.float64)
    return params, x, torch.randint(V, (N,), generator=draw)


def loss(params: Params, x: Tensor, labels: Tensor) -> Tensor:
    for _ in range(2):
        h = F.rms_norm(x, (D,), params["norm"], 1e-5)
        inner = F.gelu(h @ params["up"] + params["b"]) + F.silu(h @ params["gate"]) * h.sum()
        weights = torch.softmax(h @ h.t(), -1)
        x = x + weights @ (inner @ params["down"])
    return F.cross_entropy(x @ params["head"], labels)


def step(params: Params, x: Tensor, labels: Tensor) -> tuple[Params, Tensor]:
    slopes, value = torch.func.grad_and_value(loss)(params, x, labels)
    return optree.tree_map(lambda p, g: p - 0.1 * g, params, slopes), value


def taking(name: str) -> Callable[..., str]:
    return lambda candidates, tensors: name if name in candidates else next(iter(candidates))


@pytest.mark.parametrize("way", ["eager", "blocked", "inductor", "blocked inductor"])
def test_ten_steps_are_those_of_the_plain_function(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one step returns is the next one's input, while what was before it is written over."""
    monkeypatch.setattr(choice, "fastest", taking(way))
    if "inductor" not in way:
        monkeypatch.setattr(choice, "compiled", lambda program, tensors: bind(program))
    params, x, labels = drawn()
    plain, losses = params, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the compiler warns about torch.jit
        fused = fuse(step)
        first, _ = fused(params, x, labels)
        kept = optree.tree_map(torch.clone, first)
        for _ in range(10):
            params, value = fused(params, x, labels)
            plain, expected = step(plain, x, labels)
            losses.append((value, expected))
    torch.testing.assert_close(params, plain, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*zip(*losses, strict=True), rtol=1e-10, atol=1e-10)
    assert all(torch.equal(first[k], kept[k]) for k in first)
    ways = {str(use.how).partition(",")[0] for use in fused.lower(params, x, labels).kernels}
    assert way in ways


def test_a_graph_keeps_what_it_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten forwards before the first backward: their residuals are nobody else's."""
    monkeypatch.setattr(choice, "fastest", taking("blocked"))
    monkeypatch.setattr(choice, "compiled", lambda program, tensors: bind(program))
    params, x, labels = drawn()
    given = {k: v.requires_grad_() for k, v in params.items()}
    fused = fuse(loss)
    values = [fused(given, (i + 1) * x, labels) for i in range(10)]
    for i in (3, 9, 0, 5):
        found = torch.autograd.grad(values[i], list(given.values()))
        expected = torch.autograd.grad(loss(given, (i + 1) * x, labels), list(given.values()))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_jit_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "fastest", taking("blocked"))
    monkeypatch.setattr(choice, "compiled", lambda program, tensors: bind(program))
    params, x, labels = drawn()
    run: Any = jit(fuse(step), backend="eager", donate_argnums=0)
    ours, plain = optree.tree_map(torch.clone, params), params
    for _ in range(5):
        ours, _ = run(ours, x, labels)
        plain, _ = step(plain, x, labels)
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
