"""value_and_grad and eval_shape: torch.func's results in JAX's order, and results without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import jvp, vmap

import torchard as ta
from torchard import (
    Mesh,
    P,
    PurityError,
    ShapeDtype,
    checkpoint,
    eval_shape,
    jit,
    place,
    shard,
    value_and_grad,
)

X = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)


def loss(w: dict[str, Any], x: Any) -> Any:
    y = x * w["a"]
    return y.square().sum(), {"y": y, "name": "aux"}


@pytest.mark.parametrize("transform", [lambda f: f, jit, checkpoint])
def test_the_value_is_first(transform: Any) -> None:
    w = {"a": torch.tensor(3.0, dtype=torch.float64)}
    (value, aux), gradient = transform(value_and_grad(loss, has_aux=True))(w, X)
    assert value == 9 * X.square().sum() and gradient["a"] == 6 * X.square().sum()
    assert torch.equal(aux["y"], 3 * X) and aux["name"] == "aux"
    value, (of_w, of_x) = transform(value_and_grad(lambda w, x: loss(w, x)[0], (0, 1)))(w, X)
    assert value == 9 * X.square().sum()
    assert torch.equal(of_x, 18 * X) and of_w["a"] == gradient["a"]


def test_it_is_mapped_and_differentiated() -> None:
    both = value_and_grad(lambda x: (x**3).sum())
    value, gradient = vmap(both)(X)
    assert torch.equal(value, (X**3).sum(1)) and torch.equal(gradient, 3 * X**2)
    assert torch.equal(jvp(both, (X,), (X,))[1][1], 6 * X * X)


def test_shapes_of_results() -> None:
    run = shard(lambda a, b: (a @ b, {"n": a.sum(1).long(), "k": 3}), Mesh({"a": 2}, virtual=True))
    a, b = ShapeDtype((2, 10**9), torch.float64), ShapeDtype((10**9, 3), torch.float64)
    want = ShapeDtype((2, 3), torch.float64), {"n": ShapeDtype((2,), torch.int64), "k": 3}
    assert eval_shape(run, a, b=b) == want
    placed = place(torch.ones(4, 2), Mesh({"a": 2}, virtual=True), P("a"))
    assert eval_shape(lambda x: x.T, placed) == ShapeDtype((2, 4))
    assert jit(lambda x: x * eval_shape(lambda x: x.sum(0), x).shape[0])(X)[0, 0] == 2
    with pytest.raises(PurityError, match=r"test_value_and_grad.py:\d+ in <lambda>"):
        eval_shape(lambda x: x if x.sum() > 0 else -x, a)
    assert ta.eval_shape(ta.scan, lambda c, x: (c + x, c), 0.0, X[0])[1].shape == (2,)
