"""Functions that run again for their derivatives, made inside others whose values they close over."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import examples
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

from torchard import Mesh, checkpoint, jit, shard

F64 = torch.float64
X = torch.linspace(-1.2, 1.3, 12, dtype=F64).reshape(3, 4)
W = torch.linspace(0.3, 1.4, 4, dtype=F64)
Fn = Callable[..., Any]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * grad

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * tangent

    @staticmethod
    def vmap(info: Any, dims: Any, x: torch.Tensor) -> Any:
        return square(x), dims[0]


def square(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return found


def stopped(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * 2


# Of an argument, and of a value of the function around; `inner` is the transform, or nothing.
BODIES: dict[str, Callable[[Fn, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "plain": lambda inner, a, o: (a * o).sin(),
    "a Function": lambda inner, a, o: square(a * o).sin(),
    "no_grad": lambda inner, a, o: (a * o).sin() * stopped(a),
    "no_grad of the outer": lambda inner, a, o: (a * o).sin() * stopped(o),
    "nested": lambda inner, a, o: inner(lambda b: (b * o).sin() * a)(a),
    "nested Function": lambda inner, a, o: inner(lambda b: square(b * o).sin() * a)(a),
    "nested no_grad": lambda inner, a, o: inner(lambda b: (b * o).sin() * stopped(a))(a),
    "gradient": lambda inner, a, o: grad(lambda b: (b * o * b).sin().sum())(a),
}
INNER: dict[str, Fn] = {
    "checkpoint": checkpoint,
    "jit": lambda f: jit(f, backend="eager"),
}
BOTH = {"argnums": (0, 1)}
MESH = Mesh({"x": 3}, virtual=True)


def made(body: str, inner: Fn) -> Fn:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        outer = w * 2
        return inner(lambda a: BODIES[body](inner, a, outer))(x).sum()

    return f


def second_by_autograd(f: Fn) -> Any:
    x, w = X[0].clone().requires_grad_(), W.clone().requires_grad_()
    first = torch.autograd.grad(f(x, w), (x, w), create_graph=True)
    return torch.autograd.grad(sum(t.sin().sum() for t in first), (x, w))


STACKS: dict[str, Callable[[Fn], Any]] = {
    "grad": lambda f: grad(f, **BOTH)(X[0], W),
    "vmap of grad": lambda f: vmap(grad(f, **BOTH), in_dims=(0, None))(X, W),
    "grad of vmap": lambda f: grad(lambda x, w: vmap(f, in_dims=(0, None))(x, w).sum(), **BOTH)(X, W),
    "hvp": lambda f: jvp(grad(f, **BOTH), (X[0], W), (X[1], W)),
    "hessian": lambda f: hessian(f, argnums=1)(X[0], W),
    "second": lambda f: grad(lambda x, w: grad(f, argnums=1)(x, w).sin().sum(), **BOTH)(X[0], W),
    "mixed": lambda f: jacrev(jacrev(f, argnums=1), argnums=0)(X[0], W),
    "second by autograd": second_by_autograd,
    "checkpoint of vmap of grad": lambda f: checkpoint(vmap(grad(f, **BOTH), in_dims=(0, None)))(X, W),
    "checkpoint of hvp": lambda f: checkpoint(lambda x, w: jvp(grad(f, **BOTH), (x, w), (x, w)))(
        X[0], W
    ),
    "shard of vmap of grad": lambda f: [
        t.full() for t in shard(vmap(grad(f, **BOTH), in_dims=(0, None)), MESH)(X, W)
    ],
}


@pytest.mark.parametrize("body", BODIES)
def test_derivatives_of_functions_made_inside_others(body: str) -> None:
    draw = random.Random(body)
    cases = [(stack, inner) for stack in STACKS for inner in INNER]
    for stack, inner in draw.sample(cases, examples(ci=4, explore=len(cases))):
        want = tree_leaves(STACKS[stack](made(body, lambda f: f)))
        got = tree_leaves(STACKS[stack](made(body, INNER[inner])))
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-10, atol=1e-12, msg=f"{stack}, {inner}"
            )
