"""Which results are gradients of which inputs: what autograd was asked for, in any order.

A gradient that a function takes inside, and returns, is held as its input. Inputs here have one
shape, and a spec each, so that only the pairing tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from any_size import fuse
from hypothesis import given, settings
from hypothesis import strategies as st

from torchard import Mesh, MeshTensor, P, checkpoint, jit, place, random, shard

MESH = Mesh({"a": 2, "b": 2}, virtual=True)
SPECS = [P("a", None), P(None, "a"), P("b", None), P(None, "b"), P("a", "b"), P("b", "a")]
WEIGHTS = [random.normal(random.key(i), (4, 4), dtype=torch.float64) for i in range(4)]
X = random.normal(random.key(9), (4, 4), dtype=torch.float64)
Weights = Sequence[Any]


def loss(weights: Weights, x: Any) -> Any:
    for w in weights:
        x = torch.tanh(x @ w)
    return x.square().sum()


def by_grad(weights: Weights, x: Any) -> Any:
    return torch.func.grad(loss)(weights, x)


def by_position(weights: Weights, x: Any) -> Any:
    last = len(weights) - 1
    flipped = torch.func.grad(lambda *ws: loss(ws, x), argnums=tuple(range(last, -1, -1)))(*weights)
    return flipped[::-1]


def by_vjp(weights: Weights, x: Any) -> Any:
    value, pull = torch.func.vjp(loss, weights, x)
    return pull(torch.ones_like(value))[0]


def one_by_one(weights: Weights, x: Any) -> Any:
    def of(i: int) -> Any:
        return torch.func.grad(lambda w: loss([*weights[:i], w, *weights[i + 1 :]], x))(weights[i])

    return [of(i) for i in reversed(range(len(weights)))][::-1]


def of_narrow_copies(weights: Weights, x: Any) -> Any:
    found = torch.func.grad(loss)([w.to(torch.float32) for w in weights], x.to(torch.float32))
    return [g.to(torch.float64) for g in found]


def of_a_gradient(weights: Weights, x: Any) -> Any:
    def slope(weights: Weights, x: Any) -> Any:
        return sum(g.square().sum() for g in by_grad(weights, x))

    return torch.func.grad(slope)(weights, x)


def of_a_checkpoint(weights: Weights, x: Any) -> Any:
    return torch.func.grad(checkpoint(loss))(weights, x)


def of_an_inner_shard(weights: Weights, x: Any) -> Any:
    return torch.func.grad(shard(loss, MESH))(weights, x)


def in_an_inner_shard(weights: Weights, x: Any) -> Any:
    return shard(by_grad, MESH)(weights, x)


def in_an_inner_jit(weights: Weights, x: Any) -> Any:
    return jit(one_by_one, backend="eager")(weights, x)


def of_plain_autograd(weights: Weights, x: Any) -> Any:
    leaves = [w.detach().requires_grad_() for w in weights]
    return torch.autograd.grad(loss(leaves, x), leaves)


WAYS = [
    by_grad,
    by_position,
    by_vjp,
    one_by_one,
    of_narrow_copies,
    of_a_gradient,
    of_a_checkpoint,
    of_an_inner_shard,
    in_an_inner_shard,
    in_an_inner_jit,
    of_plain_autograd,
]


def check(way: Callable[..., Any], specs: Sequence[P], order: Sequence[int]) -> None:
    def f(weights: Weights, x: Any) -> Any:
        found = way(weights, x)
        return [found[i] for i in order]

    weights = WEIGHTS[: len(specs)]
    placed = [place(w, MESH, spec) for w, spec in zip(weights, specs, strict=True)]
    got = shard(f, MESH)(placed, X)
    assert [g.spec for g in got] == [specs[i] for i in order]
    for mine, exact in zip(got, f(weights, X), strict=True):
        exact = exact.full() if isinstance(exact, MeshTensor) else exact
        torch.testing.assert_close(mine.full(), exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_in_another_order_are_those_of_their_inputs(way: Callable[..., Any]) -> None:
    check(way, [P("a", None), P(None, "a"), P("b", None)], [2, 0, 1])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_gradients_of_some_inputs_in_any_order(data: Any) -> None:
    specs = data.draw(st.lists(st.sampled_from(SPECS), min_size=2, max_size=4))
    order = data.draw(st.permutations(range(len(specs))))
    few = data.draw(st.integers(1, len(order)))
    check(data.draw(st.sampled_from(WAYS[:4])), specs, order[:few])


def test_gradients_of_what_a_function_closes_over() -> None:
    weights = [place(w, MESH, s) for w, s in zip(WEIGHTS, SPECS[:4], strict=True)]
    got = shard(lambda x: by_grad(weights, x)[::-1], MESH)(X)
    assert [g.spec for g in got] == SPECS[:4][::-1]


def test_gradients_of_fused_functions() -> None:
    placed = [place(w, MESH, s) for w, s in zip(WEIGHTS, SPECS[:4], strict=True)]
    got = fuse(shard(lambda ws, x: by_grad(ws, x)[::-1], MESH))(placed, X)
    assert [g.spec for g in got] == SPECS[:4][::-1]


def test_gradients_of_mapped_weights() -> None:
    stacks = [torch.stack([w, 2 * w]) for w in WEIGHTS[:2]]
    placed = [place(stacks[0], MESH, P("a")), place(stacks[1], MESH, P("b"))]
    got = shard(lambda ws, x: torch.vmap(by_grad, (0, None))(ws, x)[::-1], MESH)(placed, X)
    assert [g.spec for g in got] == [P("b", None, None), P("a", None, None)]


def test_a_gradient_laid_out_in_another_way_is_not_that_of_its_input() -> None:
    def f(w: Any, x: Any) -> Any:
        return torch.vmap(torch.func.grad(lambda w: loss([w], x)), 1, 1)(w)

    w = place(WEIGHTS[0], MESH, P("a", None))
    x = random.normal(random.key(3), (4, 4), dtype=torch.float64)
    assert shard(lambda w: f(w, x), MESH)(w).full().allclose(f(WEIGHTS[0], x))
