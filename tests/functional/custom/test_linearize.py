"""linearize, linear_transpose, closure_convert, typeof: beside torch.func; in transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap

import torchard as ta
from torchard import (
    DerivativeError,
    Mesh,
    P,
    PurityError,
    checkpoint,
    closure_convert,
    fuse,
    jit,
    shard,
)

Fn = Callable[..., Any]
F64 = torch.float64
MESH = Mesh({"a": 2}, virtual=True)
generator = torch.Generator().manual_seed(0)
X, V, W = torch.randn(3, 4, generator=generator, dtype=F64)
TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "none": lambda f: f,
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "shard": lambda f: shard(f, MESH),
}


def curve(p: Any) -> Any:
    """Of a tree with an integer, to a tree with an integer."""
    y = torch.tanh(p["x"]) * p["x"] * p["w"]
    total = ta.fori_loop(0, 3, lambda i, y: y.sin() + p["w"], y)
    return {"y": y, "n": p["n"] + 1, "total": total}


def pushed(x: Any, v: Any) -> Any:
    """By linearize."""
    p = {"x": x, "w": W, "n": torch.tensor(3)}
    out, push = ta.linearize(curve, p)
    twice = [push({"x": t, "w": torch.zeros_like(W), "n": None}) for t in (v, v.sin())]
    assert all(each["n"] is None for each in twice)
    return out["y"] + twice[0]["y"] * twice[1]["total"]


def by_torch(x: Any, v: Any) -> Any:
    def f(x: Any) -> Any:
        out = curve({"x": x, "w": W, "n": torch.tensor(3)})
        return out["y"], out["total"]

    (y, _), (first, _) = jvp(f, (x,), (v,))
    return y + first * jvp(f, (x,), (v.sin(),))[1][1]


WAYS: dict[str, Callable[[Fn], Fn]] = {
    "as it is": lambda f: f,
    "grad": lambda f: grad(lambda x, v: f(x, v).sum(), (0, 1)),
    "jvp": lambda f: lambda x, v: jvp(f, (x, v), (v, x)),
    "vmap": lambda f: lambda x, v: vmap(f, (0, None))(torch.stack([x, v]), v),
    "vmap of grad": lambda f: lambda x, v: vmap(grad(lambda x: f(x, v).sum()))(torch.stack([x, v])),
    "hessian": lambda f: hessian(lambda x, v: f(x, v).sum()),
    "jacrev": jacrev,
}


def same(have: Any, want: Any) -> None:
    for a, b in zip(ta.tree.leaves(have), ta.tree.leaves(want), strict=True):
        torch.testing.assert_close(a.full() if hasattr(a, "full") else a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_linearize_pushes_tangents_forward(name: str, way: str) -> None:
    transform, want = TRANSFORMS[name], WAYS[way](by_torch)(X, V)
    same(transform(WAYS[way](pushed))(X, V), want)
    same(WAYS[way](transform(pushed))(X, V), want)


def test_the_function_runs_once() -> None:
    calls = []

    def f(x: torch.Tensor) -> torch.Tensor:
        ta.debug.callback(lambda: calls.append(1))
        return x.sin()

    _, push = ta.linearize(f, X)
    same(vmap(push)(torch.eye(4, dtype=F64)), torch.diag(X.cos()))
    push(V)
    assert len(calls) == 1


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transposes(name: str) -> None:
    def linear(p: Any) -> Any:
        return {"s": p["a"].cumsum(0) + 2 * p["b"]}, p["b"].sum()

    def transposed(c: Any, d: Any) -> Any:
        shapes = {"a": ta.ShapeDtype((4,), F64), "b": ta.ShapeDtype((4,), F64)}
        (found,) = ta.linear_transpose(linear, shapes)(({"s": c}, d))
        return found["a"], found["b"]

    c, d = X, torch.tensor(2.0, dtype=F64)
    same(TRANSFORMS[name](transposed)(c, d), (c.flip(0).cumsum(0).flip(0), 2 * c + d))
    same(grad(lambda c: TRANSFORMS[name](transposed)(c, d)[0].square().sum())(c).shape, c.shape)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_closures_become_arguments(name: str) -> None:
    def outer(w: torch.Tensor, x: torch.Tensor) -> Any:
        def inner(x: torch.Tensor, power: int) -> Any:
            total = ta.scan(lambda c, row: (c + w.sum() * row**power, None), x[0], x)[0]
            return {"total": total, "power": power}

        converted, tensors = closure_convert(inner, x, 2)
        slope = grad(lambda x, *ts: converted(x, 2, *ts)["total"].sum(), argnums=1)(x, *tensors)
        assert converted(x, 2, *tensors)["power"] == 2
        return slope + x

    want = torch.ones_like(W) * X.square().sum() + X
    same(TRANSFORMS[name](outer)(W, X), want)
    same(
        jacrev(TRANSFORMS[name](outer), 1)(W, X), jacrev(lambda w, x: x.square().sum() + x, 1)(W, X)
    )
    same(vmap(outer, (0, None))(torch.stack([W, V]), X), want.expand(2, 4))


def test_refusals() -> None:
    with pytest.raises(DerivativeError, match="no argument has a floating tensor"):
        ta.linearize(lambda n: n * 2.5, torch.tensor(3))
    with pytest.raises(DerivativeError, match="no result has a floating tensor"):
        ta.linearize(torch.argmax, X)
    with pytest.raises(DerivativeError, match="tangents are PyTreeSpec"):
        ta.linearize(torch.sin, X)[1](X, X)
    with pytest.raises(
        DerivativeError, match=r"tangents\[0\] is float32\[4\], and must be torch.float64"
    ):
        ta.linearize(torch.sin, X)[1](X.float())
    with pytest.raises(DerivativeError, match="the cotangent are PyTreeSpec"):
        ta.linear_transpose(lambda x: 2 * x, X)((X, X))
    converted, _ = closure_convert(lambda x, n: x * n, X, 2)
    for wrong in ((X, 3), (X[:2], 2), (X, 2, X)):
        with pytest.raises(ValueError, match="convert it again"):
            converted(*wrong)


def test_what_is_no_floating_tensor_stays() -> None:
    (double, *rest), push = ta.linearize(lambda x: (2 * x, 3, None, "a", torch.tensor(4)), X)
    assert rest[:3] == [3, None, "a"] and rest[3].item() == 4
    same(push(V)[0], 2 * V)
    assert push(V)[1:] == (None, None, None, None) and torch.equal(double, 2 * X)
    taken = ta.linear_transpose(lambda x, rows: x[rows], X, torch.tensor([0, 2]))(V[:2])
    same(taken[0], torch.stack([V[0], 0 * V[0], V[1], 0 * V[0]]))


def test_a_converted_function_keeps_its_derivatives() -> None:
    """Of detached values, of a rule, and of what is placed."""
    ruled = ta.custom_vjp(torch.sin)
    ruled.defvjp(lambda x: (x.sin(), x), lambda x, c: (10 * c * x.cos(),))
    placed = ta.place(W, MESH, P("a"))
    fns = {
        "detached": (lambda x: x * W.detach() + W, torch.ones_like(W)),
        "ruled": (lambda x: ruled(x * W), 10 * (X * W).cos() * X),
        "placed": (shard(lambda x: x * placed, MESH), X),
    }
    for fn, want in fns.values():
        converted, tensors = closure_convert(fn, X)
        have = grad(lambda *ts, converted=converted: ta.full(converted(X, *ts)).sum())(*tensors)
        same(have, want)


def test_types_say_how_values_are_split() -> None:
    run = shard(lambda x: {"rows": x * 2, "sum": x.sum(0)}, MESH, in_specs=P("a"))
    found = ta.eval_shape(run, ta.ShapeDtype((4, 3)))
    assert (found["rows"].spec, found["sum"].spec) == (P("a", None), P(None))
    placed = ta.place(torch.ones(4, 3), MESH, P(None, "a"))
    # Three columns over two ranks.
    assert ta.typeof(placed).spec == P(None, "a") and ta.typeof(placed).shape == (4, 3)
    assert ta.typeof(X).spec is None and ta.typeof(X) == ta.ShapeDtype((4,), F64)
    with pytest.raises(
        PurityError, match=r"test_linearize.py.*plan.specs, or choose it, by constrain"
    ):
        run = shard(lambda x: x * len(ta.typeof(x).spec), MESH)
        run(placed)
    with pytest.raises(TypeError, match="typeof: x is int"):
        ta.typeof(3)
