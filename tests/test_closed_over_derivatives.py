"""A derivative inside a transformed function, straight of a tensor that the function closes over.

torch wraps such a tensor before anything is computed of it; levels of torch.func stand around the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_derivations import MESH, TRANSFORMS, W, X, crossed, same, whole
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

from torchard.functional.errors import DerivativeError
from torchard.sharding import P, place

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


PLACED: dict[str, Fn] = {
    "grad": lambda x: grad(lambda x: x.sin().sum())(x),
    "vjp": lambda x: vjp(lambda x: x.sin(), x)[1](torch.ones_like(X))[0],
    "grad of grad": lambda x: grad(lambda x: grad(lambda x: (x**3).sum())(x).sum())(x),
    "grad of a product": lambda x: grad(lambda x: (X * x).sum())(x),
}


@crossed("inside", PLACED)
def test_a_derivative_straight_of_a_placed_tensor_is_refused(inside: str, name: str) -> None:
    fn, transform, placed = PLACED[inside], TRANSFORMS[name], place(X, MESH, P("dp"))
    with pytest.raises(DerivativeError, match=r"closes over.*as an argument"):
        transform(lambda: fn(placed))()
    same(transform(fn)(placed), fn(X))
    # Something computed of it is as good as an argument.
    same(transform(lambda: fn(placed * 1))(), fn(X))


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
