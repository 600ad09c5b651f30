"""Ways to take the gradient of a function with effects, and what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.func import grad, jvp, vmap

from torchard import checkpoint, jit, shard
from torchard.sharding import Mesh, P

Fn = Callable[[torch.Tensor], torch.Tensor]

MESH = Mesh({"x": 2}, virtual=True)


def _sharded(fn: Fn) -> Any:
    return shard(fn, MESH, in_specs=(P("x"),), out_specs=P())

STACKS: dict[str, Callable[[Fn], Any]] = {
    "checkpoint": checkpoint,
    "jit": lambda fn: jit(fn, backend="eager"),
    "shard": _sharded,
    "shard of checkpoint": lambda fn: _sharded(checkpoint(fn)),
    "checkpoint of shard": lambda fn: checkpoint(_sharded(fn)),
}


def backward(fn: Fn, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(fn(x), x)[0]


def second(fn: Fn, x: torch.Tensor) -> torch.Tensor:
    """A Hessian-vector product by autograd, where every stop stops both derivatives.

    Of `z = y * y; y.data.mul_(0.5)` autograd takes the y of after the write, and gives half of what
    finite differences do: of the sum of z², at [1, 2], [2, 16] for [4, 32]. torch.func gives the same
    gradient and refuses the second, as the library does.
    """
    _unless_written_behind(lambda: _second_of(grad(fn), x))
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(fn(x), x, create_graph=True)
    if not first.requires_grad:
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad((first * _direction(x)).sum(), x, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


def _unless_written_behind(run: Callable[[], object]) -> None:
    try:
        run()
    except RuntimeError as error:
        if "modified by an inplace operation" in str(error):
            raise


def _direction(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel(), dtype=x.dtype).view(x.shape).cos()


def _second_of(gradient: Fn, x: torch.Tensor) -> torch.Tensor:
    return grad(lambda x: (gradient(x) * _direction(x)).sum())(x)


def _many(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, -x])


def _each_by_itself(fn: Fn, x: torch.Tensor) -> torch.Tensor:
    """Gradients of samples one by one: torch's vmap of select_scatter has another one, which is wrong."""
    vmap(fn)(_many(x))  # which torch may refuse
    return torch.stack([backward(fn, sample) for sample in _many(x)])

# The first one is torch's, the others are to equal it: by a transform T of f, outside and inside.
Plain = Callable[[Fn, torch.Tensor], Any]

Way = Callable[[Any, Fn, torch.Tensor], Any]

WAYS: dict[str, tuple[Plain, list[Way]]] = {
    "value": (lambda f, x: f(x), [lambda T, f, x: T(f)(x)]),
    "gradient": (
        backward,
        [
            lambda T, f, x: backward(T(f), x),
            lambda T, f, x: grad(T(f))(x),
            lambda T, f, x: T(grad(f))(x),
        ],
    ),
    "jvp": (
        lambda f, x: jvp(f, (x,), (_direction(x),))[1],
        [
            lambda T, f, x: jvp(T(f), (x,), (_direction(x),))[1],
            lambda T, f, x: T(lambda x: jvp(f, (x,), (_direction(x),))[1])(x),
        ],
    ),
    "vmap of grad": (
        lambda f, x: vmap(grad(f))(_many(x)),
        [
            lambda T, f, x: vmap(grad(T(f)))(_many(x)),
            lambda T, f, x: vmap(T(grad(f)))(_many(x)),
            lambda T, f, x: T(vmap(grad(f)))(_many(x)),
        ],
    ),
    "gradient of vmap": (
        lambda f, x: _each_by_itself(f, x),
        [
            lambda T, f, x: grad(lambda x: vmap(T(f))(x).sum())(_many(x)),
            lambda T, f, x: backward(lambda x: vmap(T(f))(x).sum(), _many(x)),
            lambda T, f, x: grad(T(lambda x: vmap(T(f))(x).sum()))(_many(x)),
        ],
    ),
    "second": (
        second,
        [
            lambda T, f, x: second(T(f), x),
            lambda T, f, x: _second_of(grad(T(f)), x),
            lambda T, f, x: _second_of(T(grad(f)), x),
            lambda T, f, x: T(lambda x: _second_of(grad(f), x))(x),
        ],
    ),
}


def differences(fn: Fn, x: torch.Tensor, stack: str, names: Sequence[str]) -> list[str]:
    """Where a transform of a function is not the function; what torch refuses itself is passed over."""
    found = []
    for name in names:
        plain, ways = WAYS[name]
        try:
            want = plain(fn, x)
        except RuntimeError:
            continue
        for number, way in enumerate(ways):
            try:
                have = way(STACKS[stack], fn, x)
            except Exception as error:  # a refusal is a difference, too
                found.append(f"{name} {number}: {type(error).__name__}: {str(error)[:300]}")
                continue
            if not torch.allclose(have, want, rtol=1e-9, atol=1e-9):
                found.append(f"{name} {number}: off by {float((have - want).abs().max()):.3g}")
    return found

# torch's own advice where vmap has no rule for an operation.
quiet = pytest.mark.filterwarnings("ignore:There is a performance drop")
