"""implicit.root and implicit.linear_solve: derivatives of solutions, whatever the solver is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

import torchard as ta
from torchard import DerivativeError, Mesh, checkpoint, implicit, jit, shard, tree, while_loop
from torchard.testing import check_derivatives

F64 = torch.float64
generator = torch.Generator().manual_seed(0)
W = torch.randn(3, 3, generator=generator, dtype=F64) / 4
X = torch.randn(3, generator=generator, dtype=F64)
A = torch.eye(3, dtype=F64) * 3 + W

Fn = Callable[..., Any]


def layer(z: Any, w: Any, x: Any) -> Any:
    return torch.tanh(w @ z + x)


def iterated(f: Fn, z: Any) -> Any:
    """The fixed point, by a loop that has no derivative."""
    return while_loop(lambda z: f(z).norm() > 1e-13, lambda z: z + f(z), z)


def equilibrium(w: Any, x: Any) -> Any:
    """A deep equilibrium layer."""
    return implicit.root(
        lambda z, w, x: layer(z, w, x) - z, torch.zeros_like(x), w, x, solve=iterated
    )


def unrolled(w: Any, x: Any) -> Any:
    z = torch.zeros_like(x)
    for _ in range(150):
        z = layer(z, w, x)
    return z


def total(fn: Fn) -> Fn:
    return lambda w, x: fn(w, x).square().sum()


def squares(gradients: Any) -> Any:
    return sum(g.square().sum() for g in gradients)


WAYS: dict[str, Callable[[Fn], Fn]] = {
    "as it is": lambda f: f,
    "grad": lambda f: grad(total(f), (0, 1)),
    "grad of grad": lambda f: grad(lambda w, x: squares(grad(total(f), (0, 1))(w, x)), (0, 1)),
    "jvp": lambda f: lambda w, x: jvp(f, (w, x), (w.cos(), x.cos())),
    "jvp of grad": lambda f: lambda w, x: jvp(grad(total(f), (0, 1)), (w, x), (w.cos(), x.cos())),
    "vmap": lambda f: lambda w, x: vmap(f, (None, 0))(w, torch.stack([x, x.cos()])),
    "vmap of grad": lambda f: lambda w, x: vmap(grad(total(f)), (None, 0))(w, torch.stack([x, -x])),
    "hessian": lambda f: hessian(total(f), 1),
}
TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "plain": lambda f: f,
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "shard": lambda f: shard(f, Mesh({"a": 2}, virtual=True)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_root_is_differentiated_like_the_unrolled_solver(way: str, transform: str) -> None:
    want = WAYS[way](unrolled)(W, X)
    for fn in (
        TRANSFORMS[transform](WAYS[way](equilibrium)),
        WAYS[way](TRANSFORMS[transform](equilibrium)),
    ):
        torch.testing.assert_close(tree.map(ta.full, fn(W, X)), want, rtol=1e-10, atol=1e-10)


def conjugate_gradients(matvec: Fn, b: Any) -> Any:
    x, r, p = torch.zeros_like(b), b, b
    for _ in range(6):
        along = matvec(p)
        size = (p * along).sum()
        step = r.square().sum() / torch.where(size == 0, 1, size)
        x, before, r = x + step * p, r.square().sum(), r - step * along
        p = r + r.square().sum() / torch.where(before == 0, 1, before) * p
    return x


SOLUTIONS: dict[str, Fn] = {
    "dense": lambda a, b: implicit.linear_solve(lambda x, a: a @ x, b, a),
    "symmetric": lambda a, b: implicit.linear_solve(
        lambda x, a: a @ (a.T @ x), b, a, solve=conjugate_gradients, symmetric=True
    ),
    "of a tree": lambda a, b: implicit.linear_solve(
        lambda x, a: {"u": a @ x["u"] + x["v"].sum(), "v": x["v"] * 3 + x["u"][:2]},
        {"u": b, "v": b[:2]},
        a,
    )["v"],
    "root": equilibrium,
    "root by another solver of tangents": lambda w, x: implicit.root(
        lambda z, w, x: layer(z, w, x) - z,
        torch.zeros_like(x),
        w,
        x,
        solve=iterated,
        tangent_solve=lambda matvec, b: torch.linalg.solve(torch.func.jacrev(matvec)(b), b),
    ),
}


@pytest.mark.parametrize("name", SOLUTIONS)
def test_derivatives_are_those_of_finite_differences(name: str) -> None:
    assert len(check_derivatives(SOLUTIONS[name], W if "root" in name else A, X)) == 2


def test_nothing_of_the_solver_is_differentiated() -> None:
    """A root that is rounded, and whose solver draws numbers."""

    def bisection(f: Fn, x: Any) -> Any:
        low, high = x, x + 8
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (
                torch.where(f(middle) < 0, middle, low),
                torch.where(f(middle) < 0, high, middle),
            )
        return low

    def root(a: Any) -> Any:
        return implicit.root(lambda x, a: x * x - a, torch.zeros_like(a), a, solve=bisection)

    four = torch.tensor(4.0, dtype=F64)
    torch.testing.assert_close(grad(root)(four), torch.tensor(0.25, dtype=F64))
    torch.testing.assert_close(grad(grad(root))(four), torch.tensor(-1 / 32, dtype=F64))


def test_values_that_the_equation_closes_over_are_refused() -> None:
    def root(a: Any) -> Any:
        return implicit.root(lambda x: x * x - a, a.detach(), solve=lambda f, x: x - f(x) / 4)

    with pytest.raises(DerivativeError, match="none of its arguments"):
        grad(root)(torch.tensor(4.0))


def test_as_many_equations_as_unknowns() -> None:
    with pytest.raises(DerivativeError, match=r"test_implicit.py.*shapes \[\(2,\)\]"):
        implicit.root(lambda x: x.expand(2), torch.ones(()), solve=lambda f, x: f(x))


def richardson(matvec: Fn, b: Any) -> Any:
    x = torch.zeros_like(b)
    for _ in range(80):
        x = x + 0.3 * (b - matvec(x))
    return x


def richardson_until(matvec: Fn, b: Any) -> Any:
    return while_loop(
        lambda x: (b - matvec(x)).norm() > 1e-12,
        lambda x: x + 0.3 * (b - matvec(x)),
        torch.zeros_like(b),
    )


@pytest.mark.parametrize("solve", [richardson, richardson_until])
def test_solvers_apply_the_transposed_matrix(solve: Fn) -> None:
    """Of a matrix that is not symmetric: gradients are solutions by the pullback of matvec."""
    generator = torch.Generator().manual_seed(3)
    a = 2 * torch.eye(3, dtype=F64) + 0.3 * torch.randn(3, 3, generator=generator, dtype=F64)
    b = torch.randn(3, generator=generator, dtype=F64)

    def solved(a: Any, b: Any) -> Any:
        return implicit.linear_solve(lambda x, a: a @ x, b, a, solve=solve).sin().sum()

    def of_root(a: Any, b: Any) -> Any:
        def linear(f: Fn, x: Any) -> Any:
            return solve(lambda x: f(x) - f(torch.zeros_like(x)), -f(torch.zeros_like(x)))

        root = implicit.root(
            lambda x, a, b: a @ x - b, torch.zeros_like(b), a, b, solve=linear, tangent_solve=solve
        )
        return root.sin().sum()

    def want(a: Any, b: Any) -> Any:
        return torch.linalg.solve(a, b).sin().sum()

    ways: list[Callable[[Fn], Fn]] = [
        lambda f: grad(f, (0, 1)),
        lambda f: lambda a, b: jvp(f, (a, b), (a.sin(), b.cos())),
        lambda f: lambda a, b: vmap(grad(f), (0, None))(torch.stack([a, a + 0.1]), b),
        hessian,
    ]
    for way in ways:
        for fn in (solved, of_root):
            for run in (way(fn), jit(way(fn), backend="eager"), way(jit(fn, backend="eager"))):
                for x, y in zip(tree.leaves(run(a, b)), tree.leaves(way(want)(a, b)), strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-7, atol=1e-8)
