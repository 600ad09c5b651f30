"""while_loop: equal to Python's, with and without a bound; gradients keep the carries of segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _live import LiveBytes
from torch.func import grad, hessian, jacfwd, jvp, vmap

import torchard as ta
from torchard import DerivativeError, LoopError, Mesh, P, checkpoint, fuse, jit, shard, while_loop

F64 = torch.float64
generator = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, generator=generator, dtype=F64) / 3
X = torch.tensor([-0.4, -0.6, 0.2], dtype=F64)


def going(carry: Any) -> Any:
    return carry[0].norm() > 0.003


def body(carry: Any) -> Any:
    x, n = carry
    return torch.tanh(x @ W) * 0.9 + 0.01 * x.sin(), n + 1


def ours(most: int | None) -> Callable[[Any], Any]:
    return lambda x: while_loop(going, body, (x, 0), most)


def plain(most: int | None) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        carry = x, torch.tensor(0)
        while going(carry) and (most is None or carry[1] < most):
            carry = body(carry)
        return carry

    return run


def of_each(most: int | None) -> Callable[[Any], Any]:
    return lambda xs: tuple(map(torch.stack, zip(*map(plain(most), xs), strict=True)))


def loss(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: fn(x)[0].square().sum() * fn(x)[1]


def on_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
    sharded = shard(fn, Mesh({"a": 2}, virtual=True), in_specs=P())
    return lambda *args: ta.tree.map(ta.full, sharded(*args))


def same(have: Any, want: Any) -> None:
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jit": lambda f: jit(f, backend="eager"),
    "planned": lambda f: jit(f, backend="eager", memory="planned"),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "shard": on_mesh,
}
EXAMPLES = torch.stack([X, 3 * X, X * 0])


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("most", [None, 100, 5, 0])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_equals_the_python_loop(most: int | None, transform: str) -> None:
    made, f, g = TRANSFORMS[transform], ours(most), plain(most)
    for x in EXAMPLES:  # the last one runs no iteration
        same(f(x), g(x))
        same(made(f)(x), g(x))
    same(vmap(f)(EXAMPLES), of_each(most)(EXAMPLES))
    same(made(vmap(f))(EXAMPLES), of_each(most)(EXAMPLES))
    want = jvp(lambda x: g(x)[0], (X,), (X,))
    same(made(lambda x: jvp(lambda x: f(x)[0], (x,), (x,)))(X), want)
    same(made(jacfwd(lambda x: f(x)[0]))(X), jacfwd(lambda x: g(x)[0])(X))
    if transform != "shard":
        same(vmap(made(f))(EXAMPLES), of_each(most)(EXAMPLES))
        same(jvp(lambda x: made(f)(x)[0], (X,), (X,)), want)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("most", [100, 5, 0])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_with_a_bound(most: int, transform: str) -> None:
    made, f, g = TRANSFORMS[transform], ours(most), plain(most)
    same(made(grad(loss(f)))(X), grad(loss(g))(X))
    if transform != "shard":
        same(grad(lambda x: made(loss(f))(x))(X), grad(loss(g))(X))
    if most == 5:
        same(made(hessian(loss(f)))(X), hessian(loss(g))(X))
        pair = torch.stack([X, 2 * X])
        want = torch.stack([grad(loss(g))(x) for x in pair])
        same(made(vmap(grad(loss(f))))(pair), want)


def test_gradients_without_a_bound_are_refused() -> None:
    made = TRANSFORMS["jit"]
    same(grad(loss(ours(None)))(X), grad(loss(plain(None)))(X))  # plain Python keeps all
    for fn in (made(grad(loss(ours(None)))), grad(made(loss(ours(None))))):
        with pytest.raises(DerivativeError, match=r"test_while_loop.py:.* max_steps="):
            fn(X)


def test_a_compiler_gets_the_body_once() -> None:
    for x in (X, 3 * X, X * 0):
        same(jit(ours(None))(x), plain(None)(x))
        same(jit(grad(loss(ours(100))))(x), grad(loss(plain(100)))(x))


def test_ranks_run_as_many_iterations() -> None:
    """The condition is of data that is split: one all_reduce before the loop, one in it."""
    mesh = Mesh({"a": 2}, virtual=True)

    def halved(x: Any) -> Any:
        return while_loop(lambda c: c[0].square().sum() > 1, lambda c: (c[0] / 2, c[1] + 1), (x, 0))

    fn = shard(halved, mesh, in_specs=P("a"))
    x = torch.arange(8.0, dtype=F64)
    assert [str(c) for c in fn.lower(x).collectives] == ["all_reduce(a) [] float64"] * 2
    have, want = fn(x), halved(x)
    same(ta.tree.map(ta.full, have), want)
    assert have[0].spec == P("a")


def test_no_iteration_returns_a_copy() -> None:
    fn = jit(ours(None), backend="eager")
    x = X * 0
    fn(x)[0].fill_(7)
    assert not x.any()


@pytest.mark.parametrize("steps", [4, 16, 100, 300])
def test_a_gradient_holds_the_carries_of_segments(steps: int) -> None:
    """Twice the square root of the number of iterations: segments, and iterations of one of them."""

    def last(x: Any) -> Any:
        carry = while_loop(lambda c: c[1] < steps, lambda c: (c[0].sin(), c[1] + 1), (x, 0), steps)
        return carry[0].sum()

    x = torch.randn(10_000, generator=generator, dtype=F64)
    step = jit(grad(last), backend="eager")
    step(x)
    with LiveBytes([x]) as live:
        gradient = step(x)
    assert live.peak(without=[x]) <= (2 * steps**0.5 + 1.1) * x.nbytes
    assert step.lower(x).peak <= (2 * steps**0.5 + 1.1) * x.nbytes
    want = x.clone().requires_grad_()
    y = want
    for _ in range(steps):
        y = y.sin()
    y.sum().backward()
    same(gradient, want.grad)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: while_loop(lambda c: c > 0, lambda c: c, x), r"the condition is bool\[3\]"),
        (lambda x: while_loop(lambda c: c.sum(), lambda c: c, x), r"the condition is float64\[\]"),
        (lambda x: while_loop(lambda c: 1, lambda c: c, x), "the condition is int"),
        (
            lambda x: while_loop(lambda c: c.sum() < 9, lambda c: c.float(), x),
            "the body returned float32",
        ),
        (lambda x: while_loop(lambda c: c.sum() < 9, lambda c: (c, c), x), "structure of carry"),
    ],
)
@pytest.mark.parametrize("way", [lambda f: f, TRANSFORMS["jit"]], ids=["plain", "jit"])
def test_what_does_not_fit_is_refused(way: Any, call: Callable[..., Any], said: str) -> None:
    with pytest.raises(LoopError, match=said):
        way(call)(X)


def test_a_loop_without_a_bound_is_recomputed_whole() -> None:
    """Of the loop itself no derivative is taken."""

    def f(x: Any) -> Any:
        z = while_loop(lambda z: z.sum() < 5, lambda z: z + x.detach().abs(), torch.zeros_like(x))
        return (z.detach() * x * x.sin()).sum()

    x = torch.tensor([0.5, 0.75, 0.1], dtype=F64)
    want = grad(f)(x)
    for run in (grad(checkpoint(f)), checkpoint(grad(f)), jit(grad(checkpoint(f)), backend="eager")):
        torch.testing.assert_close(run(x), want)
