"""Regions of compiled programs: what they return."""

from __future__ import annotations

from typing import Any

import live_bytes  # noqa: F401  # puts examples/ on the path
import pytest
import torch
import train_gpt
from torch import Tensor

from torchard import checkpoint, jit, nn, optim, random, scope, tree


def test_items_that_another_loop_reads() -> None:
    """The gradients of a norm are items of a tuple, which the optimizer's loop reads."""
    size = train_gpt.Size(layers=6, width=8, heads=2, context=8)

    def block(p: Any, x: Tensor) -> Tensor:
        x = x + train_gpt.attention(size, p, train_gpt.norm(p["norm1"], x))
        return x + train_gpt.mlp(p, train_gpt.norm(p["norm2"], x))

    def loss(params: Any, ids: Tensor) -> Tensor:
        x = nn.embedding(params["embedding"], ids[:, :-1]) + params["positions"]
        for i, p in enumerate(params["blocks"]):
            with scope(f"block/{i}"):
                x = checkpoint(block)(p, x)
        x = nn.linear(train_gpt.norm(params["norm"], x), params["embedding"])
        return nn.cross_entropy(x, ids[:, 1:])

    optimizer = optim.adamw(0.1)

    def step(params: Any, state: Any, ids: Tensor) -> Any:
        return optimizer.update(torch.func.grad(loss)(params, ids), state, params)

    params = train_gpt.init(size, random.key(0))
    ids = random.randint(random.key(1), (2, 9), 0, 256)
    arguments = params, optimizer.init(params), ids
    want, have = step(*arguments), jit(step, backend="aot_eager")(*arguments)
    for a, b in zip(tree.leaves(have), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_images_keep_their_layout_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would lay out what is between convolutions with its channels last."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    decide, decided = GraphLowering.decide_layout_opt, list[bool]()

    def spied(*args: Any, **kwargs: Any) -> bool:
        decided.append(decide(*args, **kwargs))
        return decided[-1]

    monkeypatch.setattr(GraphLowering, "decide_layout_opt", staticmethod(spied))
    x, w = random.normal(random.key(0), (2, 4, 7, 9)), random.normal(random.key(1), (5, 4, 3, 3))

    def convolved(x: Tensor, w: Tensor) -> Tensor:
        return torch.conv2d(x.sin(), w, padding=1).relu()

    with config.patch(force_disable_caches=True):  # code in a cache has been decided about
        torch.testing.assert_close(jit(convolved)(x, w), convolved(x, w))
    assert decided == [False]
