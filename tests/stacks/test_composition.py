"""Every stack of shard, jit and torch.func transforms, in any order, equals the plain function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import compare, per_example, sgd
from effort import examples
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from torchard import Mesh, MeshTensor, P, jit, place, random, shard

ALL = bool(examples(ci=0, explore=1))
MESHES = [{"a": 1}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}]


def f(p: Any, x: torch.Tensor) -> torch.Tensor:
    """An MLP's loss."""
    hidden = torch.tanh(F.linear(x, p["w1"], p["b1"]))
    return (F.linear(hidden, p["w2"], p["b2"]) ** 2).mean()


class Setting:
    """A mesh, a transform, and the arguments with and without it."""

    def __init__(self, axes: dict[str, int], transform: str, placed_x: bool) -> None:
        self.mesh = Mesh(axes, virtual=True)
        self.transform = transform
        keys = iter(random.split(random.key(3), 8))

        def draw(*shape: int) -> torch.Tensor:
            return random.normal(next(keys), shape, dtype=torch.float64)

        self.p = {"w1": draw(7, 5), "b1": draw(7), "w2": draw(3, 7), "b2": draw(3)}
        self.x, self.xs, self.v = draw(6, 5), draw(4, 6, 5), draw(6, 5)
        b = "b" if "b" in axes else None
        self.q = place(
            self.p, self.mesh, {"w1": P("a"), "b1": P("a"), "w2": P(None, "a"), "b2": P()}
        )
        self.y = place(self.x, self.mesh, P(b)) if placed_x else self.x
        self.u = place(self.v, self.mesh, P(b)) if placed_x else self.v

    def T(self, fn: Callable[..., Any]) -> Any:
        sharded = shard(fn, self.mesh)
        return jit(sharded, backend="eager") if self.transform == "jit" else sharded


def total(y: Any) -> Any:
    """The sum of a value, wherever it lives."""
    return shard(torch.sum, y.mesh)(y) if isinstance(y, MeshTensor) else y.sum()


CASES: dict[str, Callable[[Setting], tuple[Any, Any]]] = {
    "T": lambda s: (s.T(f)(s.q, s.y), f(s.p, s.x)),
    "grad∘T": lambda s: (grad(s.T(f), (0, 1))(s.q, s.y), grad(f, (0, 1))(s.p, s.x)),
    "T∘grad": lambda s: (s.T(grad(f, (0, 1)))(s.q, s.y), grad(f, (0, 1))(s.p, s.x)),
    "grad∘grad∘T": lambda s: (
        grad(lambda q, y: total(grad(s.T(f), 1)(q, y)))(s.q, s.y),
        grad(lambda p, x: grad(f, 1)(p, x).sum())(s.p, s.x),
    ),
    "vmap∘T": lambda s: (per_example(s.T(f))(s.q, s.xs), per_example(f)(s.p, s.xs)),
    "T∘vmap": lambda s: (s.T(per_example(f))(s.q, s.xs), per_example(f)(s.p, s.xs)),
    "vmap∘grad∘T": lambda s: (
        per_example(grad(s.T(f)))(s.q, s.xs),
        per_example(grad(f))(s.p, s.xs),
    ),
    "grad∘vmap∘T": lambda s: (
        grad(lambda q: per_example(s.T(f))(q, s.xs).sum())(s.q),
        grad(lambda p: per_example(f)(p, s.xs).sum())(s.p),
    ),
    "vmap∘vmap∘T": lambda s: (
        vmap(vmap(s.T(f), (None, 0)), (None, 0))(s.q, s.xs[:, None]),
        vmap(vmap(f, (None, 0)), (None, 0))(s.p, s.xs[:, None]),
    ),
    "jvp∘T": lambda s: (
        jvp(lambda y: s.T(f)(s.q, y), (s.y,), (s.u,)),
        jvp(lambda x: f(s.p, x), (s.x,), (s.v,)),
    ),
    "jvp∘grad∘T": lambda s: (
        jvp(lambda y: grad(s.T(f), 1)(s.q, y), (s.y,), (s.u,)),
        jvp(lambda x: grad(f, 1)(s.p, x), (s.x,), (s.v,)),
    ),
    "grad∘jvp∘T": lambda s: (
        grad(lambda q: jvp(lambda y: s.T(f)(q, y), (s.y,), (s.u,))[1])(s.q),
        grad(lambda p: jvp(lambda x: f(p, x), (s.x,), (s.v,))[1])(s.p),
    ),
    "hessian∘T": lambda s: (hessian(s.T(f), 1)(s.q, s.x), hessian(f, 1)(s.p, s.x)),
    "jacrev∘T": lambda s: (jacrev(s.T(f), 1)(s.q, s.x), jacrev(f, 1)(s.p, s.x)),
    "jacfwd∘T": lambda s: (jacfwd(s.T(f), 1)(s.q, s.x), jacfwd(f, 1)(s.p, s.x)),
    "T∘T": lambda s: (s.T(s.T(f))(s.q, s.y), f(s.p, s.x)),
    "grad∘T∘T": lambda s: (grad(s.T(s.T(f)))(s.q, s.y), grad(f)(s.p, s.x)),
    "T∘grad∘T": lambda s: (s.T(grad(s.T(f)))(s.q, s.y), grad(f)(s.p, s.x)),
    "make_fx∘T": lambda s: (make_fx(lambda x: s.T(f)(s.q, x))(s.x)(s.x), f(s.p, s.x)),
    "make_fx∘grad∘T": lambda s: (
        make_fx(lambda x: grad(s.T(f), 1)(s.q, x))(s.x)(s.x),
        grad(f, 1)(s.p, s.x),
    ),
    "T∘closure, plain": lambda s: (
        grad(lambda p: s.T(lambda x: f(p, x))(s.x))(s.p),
        grad(f)(s.p, s.x),
    ),
    "T∘closure, placed": lambda s: (
        grad(lambda q: s.T(lambda y: s.T(f)(q, y))(s.y))(s.q),
        grad(f)(s.p, s.x),
    ),
    "T∘(step with T inside)": lambda s: (
        s.T(lambda q, y: sgd(q, grad(s.T(f))(q, y)))(s.q, s.y),
        sgd(s.p, grad(f)(s.p, s.x)),
    ),
    "(step with T inside)": lambda s: (
        jit(lambda q, y: sgd(q, grad(s.T(f))(q, y)), backend="eager")(s.q, s.y),
        sgd(s.p, grad(f)(s.p, s.x)),
    ),
    "backward": lambda s: (backward(s), grad(f)(s.p, s.x)),
}


def backward(s: Setting) -> Any:
    """Plain autograd, twice: gradients of placed parameters through .backward()."""
    parts = [t.detach().clone().requires_grad_() for k in s.q for t in s.q[k].parts]
    rest = iter(parts)
    q = {
        k: MeshTensor.from_shards(
            [next(rest) for _ in s.q[k].parts], s.mesh, s.q[k].spec, shape=s.q[k].shape
        )
        for k in s.q
    }
    s.T(f)(q, s.y).backward()
    grads = iter([t.grad for t in parts])
    return {
        k: MeshTensor.from_shards(
            [next(grads) for _ in s.q[k].parts], s.mesh, s.q[k].spec, shape=s.q[k].shape
        )
        for k in s.q
    }


# Every pair of mesh, transform and kind of x; in `make explore`, all over all.
RUNS = [
    pytest.param(axes, transform, placed, id=f"{'×'.join(map(str, axes.values()))}-{transform}-{kind}")
    for number, axes in enumerate(MESHES)
    for transform in ("shard", "jit∘shard")
    for placed, kind in ((False, "plain x"), (True, "placed x"))
    if (number != 2 and (transform == "shard") == (placed == (number % 2 == 1))) or ALL
]


@pytest.mark.parametrize(("axes", "transform", "placed_x"), RUNS)
def test_equals_the_plain_function(axes: dict[str, int], transform: str, placed_x: bool) -> None:
    setting = Setting(axes, transform.split("∘")[0], placed_x)
    for name, case in CASES.items():
        try:
            compare(*case(setting))
        except Exception as error:
            raise AssertionError(f"{name} on {axes}: {error}") from error


@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 2, "b": 2}], ids=["3", "2×2"])
def test_torch_compile_gets_right_numbers(axes: dict[str, int]) -> None:
    s = Setting(axes, "shard", False)
    sharded = s.T(f)
    compiled = torch.compile(lambda p, x: sharded(p, x) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(s.p, s.x), f(s.p, s.x) * 2)


def test_inductor_runs_a_sharded_step() -> None:
    s = Setting({"a": 3}, "shard", False)
    run = jit(shard(lambda q, x: sgd(q, grad(f)(q, x)), s.mesh))
    compare(run(s.q, s.x), sgd(s.p, grad(f)(s.p, s.x)))


def test_gradient_of_inductor_compiled() -> None:
    s = Setting({"a": 3}, "shard", False)
    compare(grad(jit(shard(f, s.mesh)))(s.q, s.x), grad(f)(s.p, s.x))
