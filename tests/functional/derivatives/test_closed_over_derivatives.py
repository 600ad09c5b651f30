"""A derivative inside a transformed function, straight of a tensor that the function closes over.

torch wraps such a tensor before anything is computed of it; levels of torch.func stand around the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as torch_pytree
from derivation_cases import FEW, MESH, TRANSFORMS, W, X, crossed, same, whole
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

from torchard import tree
from torchard.functional.core.errors import PurityError
from torchard.sharding import MeshTensor, P, place

Fn = Callable[..., Any]


def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w) * 1
    y[..., 0] = 1
    return (y * y).sum()


def pulled(x: torch.Tensor) -> torch.Tensor:
    value, pull = vjp(lambda x: loss(x, W), x)
    found: torch.Tensor = pull(value.detach().cos())[0]
    return found


# Of x, each by a derivative that is given x itself.
INSIDE: dict[str, Fn] = {
    "grad": lambda x: grad(loss)(x, W),
    "grad in another argument": lambda x: grad(loss, 1)(x, W),
    "grad and value": lambda x: grad_and_value(loss)(x, W),
    "grad of grad": lambda x: grad(lambda x: grad(loss)(x, W).sum())(x),
    "vjp": pulled,
    "jvp": lambda x: jvp(lambda x: loss(x, W), (x,), (x,)),
    "jacrev": lambda x: jacrev(lambda x: torch.tanh(x @ W))(x),
    "jacfwd": lambda x: jacfwd(lambda x: torch.tanh(x @ W))(x),
    "hessian": lambda x: hessian(loss)(x, W),
    "vmap": lambda x: vmap(lambda one: one * one.sin(), -1)(x),
    "vmap of grad": lambda x: vmap(grad(lambda one: (one**3).sum()))(x),
}


def total(f: Fn) -> Fn:
    def summed(x: torch.Tensor) -> torch.Tensor:
        found = f(x)
        return sum(o.square().sum() for o in (found if isinstance(found, tuple) else (found,)))

    return summed


OUTSIDE: dict[str, Callable[[Fn], Fn]] = {
    "nothing": lambda f: f,
    "vmap": vmap,
    "grad": lambda f: grad(total(f)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "vmap of grad": lambda f: vmap(grad(total(f))),
    "jvp of vmap": lambda f: lambda x: jvp(vmap(f), (x,), (x.cos(),)),
}


@pytest.mark.sampled(4)
@crossed("inside", INSIDE)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_derivative_of_what_is_closed_over(outside: str, inside: str, name: str) -> None:
    fn, around, transform = INSIDE[inside], OUTSIDE[outside], TRANSFORMS[name]

    def closing(x: torch.Tensor) -> Any:
        return whole(transform(lambda: fn(x))())

    points, want = X[:2], around(fn)(X[:2])
    same(around(closing)(points), want)
    if outside == "nothing":
        same(transform(closing)(points), want)
        same(around(transform(closing))(points), want)


def tree_loss(params: dict[str, Any]) -> torch.Tensor:
    return loss(params["x"], params["w"]) + params["x"].sin().sum()


# Some of it placed, or all; and in trees, which torch.func takes apart.
PLACED: dict[str, Fn] = {
    **INSIDE,
    "jvp along a plain tangent": lambda x: jvp(lambda x: loss(x, W), (x,), (X.cos(),)),
    "jvp along a placed tangent": lambda x: jvp(lambda x: loss(x, W), (X,), (x,)),
    "jvp along what is computed": lambda x: jvp(lambda x: loss(x, W), (x,), (x.detach().cos(),)),
    "pulled back": lambda x: vjp(lambda y: (y @ W).sin(), X)[1]((x * 1) @ W)[0],
    "a placed cotangent": lambda x: vjp(lambda y: y.sin() * 1, X)[1](x)[0],
    "a tree": lambda x: grad(tree_loss)({"x": x, "w": W})["x"],
    "two": lambda x: grad(lambda a, b: (a * b).sin().sum(), (0, 1))(x, X),
    "has nothing to do with it": lambda x: grad(lambda y, x: y.sin().sum() + x.sum())(X, x),
    "aux": lambda x: grad(lambda y: (y.sin().sum(), x), has_aux=True)(x),
    "vmap over one of two": lambda x: vmap(lambda a, b: a + b.sin(), (0, None))(X, x),
    "vmap over both": lambda x: vmap(lambda a, b: a + b.sin())({"x": x}["x"], X),
    "vmap that returns it": lambda x: vmap(lambda a: (a, x), out_dims=(0, None))(X)[1],
    "in chunks": lambda x: jacrev(lambda y: torch.tanh(y @ W), chunk_size=2)(x),
    "linearize": lambda x: linearize(lambda y: torch.tanh(y @ W), x)[1](x),
}


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own linearize
@crossed("inside", PLACED)
@pytest.mark.parametrize("spec", [P("dp"), P(None, "dp"), P()], ids=str)
def test_a_derivative_straight_of_a_placed_tensor(inside: str, spec: P, name: str) -> None:
    fn, transform, placed = PLACED[inside], TRANSFORMS[name], place(X, MESH, spec)
    want = fn(X)
    same(transform(lambda: fn(placed))(), want)
    same(transform(fn)(placed), want)
    if not FEW or spec == P("dp"):
        same(transform(lambda: transform(lambda: fn(placed))())(), want)


READ: dict[str, Fn] = {
    "mean of the leaves": lambda x: sum(leaf.mean() for leaf in tree.leaves({"x": x, "w": W})),
    "sizes": lambda x: x.sum() * sum(leaf.shape[0] for leaf in torch_pytree.tree_leaves([x])),
    "mapped": lambda x: tree.map(torch.sin, {"x": x})["x"] * 1,
    "mapped by torch": lambda x: torch_pytree.tree_map(torch.sin, {"x": x})["x"] * 1,
    "mapped with gradients": lambda x: tree.map(lambda p, g: p - g, {"x": x}, {"x": X.cos()})["x"],
    "mapped with itself": lambda x: torch_pytree.tree_map(lambda p, q: p * q, {"x": x}, {"x": x})["x"],
    "in parts": lambda x: tree.partition({"x": x, "n": 3})[0]["x"].softmax(0),
    "returned": lambda x: {"x": x, "y": X.sin()}["x"],
}


@crossed("inside", READ)
@pytest.mark.parametrize("spec", [P("dp"), P(None, "dp"), P()], ids=str)
def test_a_placed_tensor_is_one_leaf_inside(inside: str, spec: P, name: str) -> None:
    fn, transform, placed = READ[inside], TRANSFORMS[name], place(X, MESH, spec)
    same(transform(lambda: fn(placed))(), fn(X))
    same(transform(fn)(placed), fn(X))


def test_shards_computed_inside_are_no_placed_tensor() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return MeshTensor.from_shards([x[:2] * 2, x[2:] * 2], MESH, P("dp"), shape=X[:4].shape).sin()

    with pytest.raises(PurityError, match=r"test_closed_over.*shards computed.*place the result"):
        TRANSFORMS["shard"](halves)(X[:4])


def test_a_placed_tensor_is_taken_apart_outside() -> None:
    """Derivatives of transforms, in plain code, are of its shards."""
    placed = place(X, MESH, P("dp"))
    found = grad(TRANSFORMS["shard"](lambda x: (x**3).sum()))(placed)
    assert found.spec == placed.spec
    same(found, 3 * X**2)


UNDER: dict[str, Callable[[Fn], Fn]] = {
    "jacfwd": lambda f: jacfwd(f, 1),
    "hessian": lambda f: hessian(f, 1),
    "jacfwd of grad": lambda f: jacfwd(grad(f, 1), 1),
    "vmap of grad": lambda f: vmap(grad(f, 1), (None, 0)),
}


@crossed("under", UNDER)
@pytest.mark.parametrize("inner", TRANSFORMS)
def test_what_is_closed_over_and_has_no_part_in_the_result(
    inner: str, under: str, name: str
) -> None:
    """It is no operand of the trace, and foreign all the same when the function runs again."""
    derived, ids = UNDER[under], torch.tensor([2, 0, 1])
    passed = TRANSFORMS[inner](lambda ids, x: (x**3).sum())

    def closing(ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return whole(TRANSFORMS[name](lambda x: whole(passed(ids, x)))(x))

    same(derived(closing)(ids, X[:2]), derived(lambda ids, x: (x**3).sum())(ids, X[:2]))
