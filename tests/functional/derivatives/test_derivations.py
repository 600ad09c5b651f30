"""Derivations inside and outside of transforms: right wherever torch alone is.

Each test is one mechanism; `random_stacks.py` draws them all together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from derivation_cases import F64, FEW, MESH, TRANSFORMS, W, X, crossed, everywhere, same, whole
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from torchard import trace
from torchard.sharding import P, shard

# -- zero tangents ----------------------------------------------------------------------------------


def net(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).sum()


def of_points(derivative: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """A physics-informed loss: a derivative in the coordinates, per point."""

    def loss(w: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return vmap(lambda x: derivative(lambda x: net(w, x))(x))(points).square().sum()

    return loss


POINTWISE: dict[str, Callable[[Any], Any]] = {
    "laplacian": lambda u: lambda x: torch.trace(hessian(u)(x)),
    "forward over reverse": lambda u: lambda x: torch.trace(jacfwd(jacrev(u))(x)),
    "forward over forward": lambda u: lambda x: jacfwd(jacfwd(u))(x).diagonal().sum(),
    "along one direction": lambda u: lambda x: jvp(grad(u), (x,), (x.detach(),))[1].sum(),
    "divergence": lambda u: lambda x: jacfwd(grad(u))(x).diagonal().sum(),
}


@crossed("pointwise", POINTWISE)
def test_gradients_of_derivatives_per_point(pointwise: str, name: str) -> None:
    loss, transform = of_points(POINTWISE[pointwise]), TRANSFORMS[name]
    want = grad(loss)(W, X)
    same(transform(grad(loss))(W, X), want)
    same(grad(transform(loss))(W, X), want)


@crossed("pointwise", ["laplacian", "along one direction"], ["checkpoint", "shard"])
def test_hessian_vector_products_of_derivatives_per_point(pointwise: str, name: str) -> None:
    loss, transform = of_points(POINTWISE[pointwise]), TRANSFORMS[name]

    def product(f: Any) -> Any:
        return lambda w, x: jvp(lambda w: grad(f)(w, x), (w,), (w.cos(),))[1]

    want = product(loss)(W, X)
    same(transform(product(loss))(W, X), want)
    same(product(transform(loss))(W, X), want)


def huge(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The tangents of x, in every operation that knows zeros, beside infinities."""
    c = x.new_tensor([float("inf"), float("nan"), 2.0])
    s = y * c
    return x + s, s - x, x * 2 + s / 3, (s.view(1, 3) - x).view(3), torch.linalg.cross(s, s) + x


@everywhere
def test_no_tangent_times_infinity_is_none(name: str) -> None:
    """A factor without a tangent is a zero in front of infinity, not NaN."""

    def pushed(x: torch.Tensor, y: torch.Tensor) -> Any:
        return jvp(lambda x: huge(x, y), (x,), (x.cos(),))[1]

    x, y = X[0], X[1]
    want = pushed(x, y)
    assert all(w.isfinite().all() for w in want)
    same(TRANSFORMS[name](pushed)(x, y), want)
    per_row = vmap(pushed, (0, None))
    same(TRANSFORMS[name](per_row)(X, y), per_row(X, y))


def test_zero_tangents_leave_nothing_in_the_program() -> None:
    def pushed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        tangent: torch.Tensor = jvp(lambda x: x * y + y * y, (x,), (x,))[1]
        return tangent

    program = trace(pushed)(X[0], X[1])
    aten = torch.ops.aten
    # A sum with a zero is a copy of the other operand, which C++ may write to.
    assert {node.target for node in program.calls} == {aten.mul.Tensor, aten._to_copy.default}


# -- numbers where tensors are ----------------------------------------------------------------------

NUMBERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "x + 1": lambda x: x.sum() + 1,
    "1 + x": lambda x: 1 + x.sum(),
    "1 - x": lambda x: 1 - x.sum(),
    "x - 1": lambda x: x.sum() - 1,
    "2 x": lambda x: 2 * x.sum(),
    "x / 2": lambda x: x.sum() / 2,
    "1 / x": lambda x: 1 / x.square().sum(),
    "x // 2": lambda x: x.sum() // 2,
    "x ** 2": lambda x: x.sum() ** 2,
    "2 ** x": lambda x: 2 ** x.sum(),
    "an epsilon": lambda x: x.mean() + 1e-6,
    "a bool": lambda x: x.sum() + True,
    "a complex number": lambda x: (x.sum() * 2j).imag,
    "of float32": lambda x: x.float().sum() * 2.5,
    "of integers": lambda x: x.argmax() * 2.5 + x.sum(),
    "alpha": lambda x: torch.add(x.sum(), 1, alpha=3),
    "from zero": lambda x: sum((row.sum() for row in x), start=0),
    "in a chain": lambda x: ((x.sum() + 1) * 2 - 3) / 4,
    "linspace to a number": lambda x: torch.linspace(x[0], 2.0, 3),
    "linspace from a number": lambda x: torch.linspace(1, x[0], 3),
    "where of numbers": lambda x: torch.where(x.sum() > 0, 1, 2) * x.sum(),
    "an element set": lambda x: F.pad(x, (1, 0), value=2).cumsum(0) + x.sum(),
}


@crossed("number", NUMBERS)
def test_numbers_beside_scalars_under_vmap(number: str, name: str) -> None:
    fn, transform = NUMBERS[number], TRANSFORMS[name]
    same(vmap(transform(fn))(X), vmap(fn)(X))
    same(transform(vmap(fn))(X), vmap(fn)(X))


def a_loss(fn: Any) -> Any:
    return lambda x: fn(x).to(F64).square().sum()


# torch has no derivative of these for one sample.
WITHOUT_GRADIENT = {"x // 2", "linspace to a number", "linspace from a number"}


@pytest.mark.parametrize("number", [n for n in NUMBERS if n not in WITHOUT_GRADIENT])
def test_gradients_per_sample_with_numbers(number: str) -> None:
    loss = a_loss(NUMBERS[number])
    want = vmap(grad(loss))(X)
    same(vmap(grad(TRANSFORMS["shard"](loss)))(X), want)
    same(fuse(vmap(grad(loss)))(X), want)


# -- values that torch reads for a check ------------------------------------------------------------

IDS = torch.tensor([2, 0, 1, 3, 3])


def chosen(x: torch.Tensor) -> torch.Tensor:
    hot = F.one_hot(IDS, 4).to(x.dtype)
    largest = F.one_hot(x.argmax(-1), num_classes=3).to(x.dtype)
    return (hot.T @ x).square().sum() + (largest * x).square().sum()


@everywhere
def test_one_hot_under_derivatives(name: str) -> None:
    transform = TRANSFORMS[name]
    for derived in (grad(chosen), hessian(chosen), lambda x: jvp(chosen, (x,), (x,))):
        same(transform(derived)(X), derived(X))
    same(grad(transform(chosen))(X), grad(chosen)(X))


ONE = torch.tensor(1)
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    how: lambda x, weight, how=how: F.nll_loss(x, ONE, weight, reduction=how)  # type: ignore[misc]
    for how in ("none", "sum", "mean")
} | {"cross entropy": lambda x, weight: F.cross_entropy(x, ONE, weight)}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", [2, 4])
def test_the_loss_of_one_row_with_weights_over_split_classes(loss: str, size: int) -> None:
    """The class is a single number, which must not be read as one."""
    fn, x, weight = LOSSES[loss], X[0].repeat(2)[:size], W[0].exp()[:size]
    sharded = shard(fn, MESH, P("dp"), P())
    same(sharded(x, weight), fn(x, weight))
    same(hessian(sharded)(x, weight), hessian(fn)(x, weight))
    rows = torch.stack([x, x.cos()])
    same(vmap(sharded, (0, None))(rows, weight), vmap(fn, (0, None))(rows, weight))

    def pushed(f: Any) -> Any:
        return lambda x: jvp(lambda x: whole(f(x, weight)), (x,), (x.cos(),))

    same(vmap(pushed(sharded))(rows), vmap(pushed(fn))(rows))


# -- what the outputs do not depend on --------------------------------------------------------------


def second(fn: Any, x: torch.Tensor, others: list[torch.Tensor]) -> Any:
    """Gradients of gradients, of everything, by autograd alone."""
    leaves = [t.clone().requires_grad_() for t in (x, *others)]
    found = torch.autograd.grad(fn(*leaves).sum(), leaves, create_graph=True, allow_unused=True)
    total = sum(g.square().sum() for g in found if g is not None and g.requires_grad)
    again = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(again, leaves, strict=True)]


UNUSED: dict[str, Callable[..., torch.Tensor]] = {
    "the last": lambda x, y, z: x.sin() * y,
    "the first": lambda x, y, z: y.sin() * z,
    "all but one": lambda x, y, z: y.sin(),
    "in its value": lambda x, y, z: x.sin() + z.detach() * 0,
    "in its second gradient": lambda x, y, z: x.sin() + z,
}


@crossed("which", UNUSED)
def test_unused_arguments_in_a_second_backward(which: str, name: str) -> None:
    fn = UNUSED[which]
    same(second(TRANSFORMS[name](fn), X, [X.cos(), X.exp()]), second(fn, X, [X.cos(), X.exp()]))


# -- transforms inside transforms ---------------------------------------------------------------------


def returned_and_read(x: torch.Tensor) -> Any:
    y = x.sin()
    return y, y.cos() * x


def returned_twice(x: torch.Tensor) -> Any:
    y = x.sin()
    return y, y, y.exp()


def an_argument_too(x: torch.Tensor) -> Any:
    return x, x.cos(), x


def a_constant_inside(x: torch.Tensor) -> Any:
    return x * torch.tensor(2.0), x.sum() * torch.tensor([1.0, 3.0]), x + torch.tensor(3)


INNER = {f.__name__: f for f in (returned_and_read, returned_twice, an_argument_too, a_constant_inside)}
SPECS = [P(), P("dp"), P(None, "dp"), (P("dp"), P(), P(None, "dp"))]


@crossed("inner", INNER)
@pytest.mark.parametrize("spec", SPECS[1::2] if FEW else SPECS, ids=str)
def test_results_of_an_inner_shard(inner: str, name: str, spec: Any) -> None:
    """What a shard inside returns is pinned there, whatever else of it is computed from it."""
    fn = INNER[inner]
    count = len(fn(X))
    specs = tuple(spec[i] if isinstance(spec, tuple) else spec for i in range(count))
    if inner == "a_constant_inside":
        specs = (specs[0], P(), P())
    sharded = shard(fn, MESH, P("dp"), specs)
    transform = TRANSFORMS[name]

    def loss(f: Any) -> Any:
        return lambda x: sum(whole(o).square().sum() for o in f(x))

    same(transform(lambda x: sharded(x))(X), fn(X))
    same(transform(grad(loss(sharded)))(X), grad(loss(fn))(X))
    same(grad(transform(loss(sharded)))(X), grad(loss(fn))(X))


def rows_written(x: torch.Tensor) -> Any:
    y = x.clone()
    y[1:] = 2 * x[:1]
    return y * x, y


def an_element_written(x: torch.Tensor) -> Any:
    y = x * 1
    y[0, 0] = 1
    y[:, 1] += x[:, 0]
    return (y * x,)


def all_written(x: torch.Tensor) -> Any:
    y = x.sin()
    y.mul_(x).t().add_(1)
    return (y.masked_fill_(x > 0.5, 2.0) * x,)


def part_stopped(x: torch.Tensor) -> Any:
    y = x.clone()
    y[0] = y[1].detach()
    return (y * y.detach(),)


INSIDE = {
    f.__name__: f
    for f in (a_constant_inside, rows_written, an_element_written, all_written, part_stopped)
}


@crossed("inside", INSIDE)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_a_trace_inside_a_trace_is_the_trace_alone(inside: str, outer: str, name: str) -> None:
    """The outer trace must not hear of what the library looks up in the inner one."""
    fn, transform = INSIDE[inside], TRANSFORMS[outer]
    inner = TRANSFORMS[name](fn)
    same(transform(lambda x: inner(x))(X), fn(X))

    def pushed(f: Any) -> Any:
        return lambda x: jvp(lambda x: tuple(map(whole, f(x))), (x,), (x.cos(),))

    same(transform(pushed(TRANSFORMS[name](fn)))(X), pushed(fn)(X))
