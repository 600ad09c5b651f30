"""Every stack of shard, jit and torch.func transforms, in any order, equals the plain function.

For three models: an MLP, and residual layers, by `repeat` and by a Python loop that becomes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import compare, per_example, sgd
from effort import examples
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from torchard import Mesh, MeshTensor, P, jit, place, random, repeat, shard
from torchard.functional.loops import equal_layers

ALL = bool(examples(ci=0, explore=1))
MESHES = [{"a": 1}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}]


@dataclass(frozen=True)
class Model:
    """A loss of parameters and x [row, 5], and the shapes and specs of the parameters."""

    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    specs: dict[str, P]


LAYERS = 3


def mlp(p: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(F.linear(x, p["w1"], p["b1"]))
    return (F.linear(hidden, p["w2"], p["b2"]) ** 2).mean()


def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + F.linear(torch.tanh(F.linear(x, p["w1"], p["b1"])), p["w2"])


def repeated(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (repeat(layer, p, x) ** 2).mean()


def looped(p: Any, x: torch.Tensor) -> torch.Tensor:
    for number in range(LAYERS):
        x = layer({name: p[f"{name}.{number}"] for name in OF_A_LAYER}, x)
    return (x**2).mean()


OF_A_LAYER = {"w1": (7, 5), "b1": (7,), "w2": (5, 7)}
SPLIT = {"w1": P("a"), "b1": P("a"), "w2": P(None, "a")}
MODELS = {
    "mlp": Model(mlp, {"w1": (7, 5), "b1": (7,), "w2": (3, 7), "b2": (3,)}, {**SPLIT, "b2": P()}),
    "repeat": Model(
        repeated,
        {name: (LAYERS, *shape) for name, shape in OF_A_LAYER.items()},
        {name: P(None, *spec) for name, spec in SPLIT.items()},
    ),
    # Each rank holds some layers whole.
    "layers apart": Model(
        repeated,
        {name: (LAYERS, *shape) for name, shape in OF_A_LAYER.items()},
        dict.fromkeys(OF_A_LAYER, P("a")),
    ),
    "list": Model(
        looped,
        {f"{name}.{number}": s for number in range(LAYERS) for name, s in OF_A_LAYER.items()},
        {f"{name}.{number}": s for number in range(LAYERS) for name, s in SPLIT.items()},
    ),
}


class Setting:
    """A model, a mesh, a transform, and the arguments with and without it."""

    def __init__(
        self, axes: dict[str, int], transform: str, placed_x: bool, model: str = "mlp"
    ) -> None:
        self.mesh = Mesh(axes, virtual=True)
        self.transform = transform
        self.f = MODELS[model].loss
        keys = iter(random.split(random.key(3), 16))

        def draw(*shape: int) -> torch.Tensor:
            return random.normal(next(keys), shape, dtype=torch.float64)

        self.p = {name: draw(*shape) for name, shape in MODELS[model].shapes.items()}
        self.x, self.xs, self.v = draw(6, 5), draw(4, 6, 5), draw(6, 5)
        b = "b" if "b" in axes else None
        self.q = place(self.p, self.mesh, MODELS[model].specs)
        self.y = place(self.x, self.mesh, P(b)) if placed_x else self.x
        self.u = place(self.v, self.mesh, P(b)) if placed_x else self.v

    def T(self, fn: Callable[..., Any]) -> Any:
        sharded = shard(fn, self.mesh)
        return jit(sharded, backend="eager") if self.transform == "jit" else sharded


def total(y: Any) -> Any:
    """The sum of a value, wherever it lives."""
    return shard(torch.sum, y.mesh)(y) if isinstance(y, MeshTensor) else y.sum()


CASES: dict[str, Callable[[Setting], tuple[Any, Any]]] = {
    "T": lambda s: (s.T(s.f)(s.q, s.y), s.f(s.p, s.x)),
    "grad∘T": lambda s: (grad(s.T(s.f), (0, 1))(s.q, s.y), grad(s.f, (0, 1))(s.p, s.x)),
    "T∘grad": lambda s: (s.T(grad(s.f, (0, 1)))(s.q, s.y), grad(s.f, (0, 1))(s.p, s.x)),
    "grad∘grad∘T": lambda s: (
        grad(lambda q, y: total(grad(s.T(s.f), 1)(q, y)))(s.q, s.y),
        grad(lambda p, x: grad(s.f, 1)(p, x).sum())(s.p, s.x),
    ),
    "vmap∘T": lambda s: (per_example(s.T(s.f))(s.q, s.xs), per_example(s.f)(s.p, s.xs)),
    "T∘vmap": lambda s: (s.T(per_example(s.f))(s.q, s.xs), per_example(s.f)(s.p, s.xs)),
    "vmap∘grad∘T": lambda s: (
        per_example(grad(s.T(s.f)))(s.q, s.xs),
        per_example(grad(s.f))(s.p, s.xs),
    ),
    "grad∘vmap∘T": lambda s: (
        grad(lambda q: per_example(s.T(s.f))(q, s.xs).sum())(s.q),
        grad(lambda p: per_example(s.f)(p, s.xs).sum())(s.p),
    ),
    "vmap∘vmap∘T": lambda s: (
        vmap(vmap(s.T(s.f), (None, 0)), (None, 0))(s.q, s.xs[:, None]),
        vmap(vmap(s.f, (None, 0)), (None, 0))(s.p, s.xs[:, None]),
    ),
    "jvp∘T": lambda s: (
        jvp(lambda y: s.T(s.f)(s.q, y), (s.y,), (s.u,)),
        jvp(lambda x: s.f(s.p, x), (s.x,), (s.v,)),
    ),
    "jvp∘grad∘T": lambda s: (
        jvp(lambda y: grad(s.T(s.f), 1)(s.q, y), (s.y,), (s.u,)),
        jvp(lambda x: grad(s.f, 1)(s.p, x), (s.x,), (s.v,)),
    ),
    "grad∘jvp∘T": lambda s: (
        grad(lambda q: jvp(lambda y: s.T(s.f)(q, y), (s.y,), (s.u,))[1])(s.q),
        grad(lambda p: jvp(lambda x: s.f(p, x), (s.x,), (s.v,))[1])(s.p),
    ),
    "hessian∘T": lambda s: (hessian(s.T(s.f), 1)(s.q, s.x), hessian(s.f, 1)(s.p, s.x)),
    "jacrev∘T": lambda s: (jacrev(s.T(s.f), 1)(s.q, s.x), jacrev(s.f, 1)(s.p, s.x)),
    "jacfwd∘T": lambda s: (jacfwd(s.T(s.f), 1)(s.q, s.x), jacfwd(s.f, 1)(s.p, s.x)),
    "T∘T": lambda s: (s.T(s.T(s.f))(s.q, s.y), s.f(s.p, s.x)),
    "grad∘T∘T": lambda s: (grad(s.T(s.T(s.f)))(s.q, s.y), grad(s.f)(s.p, s.x)),
    "T∘grad∘T": lambda s: (s.T(grad(s.T(s.f)))(s.q, s.y), grad(s.f)(s.p, s.x)),
    "make_fx∘T": lambda s: (make_fx(lambda x: s.T(s.f)(s.q, x))(s.x)(s.x), s.f(s.p, s.x)),
    "make_fx∘grad∘T": lambda s: (
        make_fx(lambda x: grad(s.T(s.f), 1)(s.q, x))(s.x)(s.x),
        grad(s.f, 1)(s.p, s.x),
    ),
    "T∘closure, plain": lambda s: (
        grad(lambda p: s.T(lambda x: s.f(p, x))(s.x))(s.p),
        grad(s.f)(s.p, s.x),
    ),
    "T∘closure, placed": lambda s: (
        grad(lambda q: s.T(lambda y: s.T(s.f)(q, y))(s.y))(s.q),
        grad(s.f)(s.p, s.x),
    ),
    "T∘(step with T inside)": lambda s: (
        s.T(lambda q, y: sgd(q, grad(s.T(s.f))(q, y)))(s.q, s.y),
        sgd(s.p, grad(s.f)(s.p, s.x)),
    ),
    "(step with T inside)": lambda s: (
        jit(lambda q, y: sgd(q, grad(s.T(s.f))(q, y)), backend="eager")(s.q, s.y),
        sgd(s.p, grad(s.f)(s.p, s.x)),
    ),
    "backward": lambda s: (backward(s), grad(s.f)(s.p, s.x)),
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
    s.T(s.f)(q, s.y).backward()
    grads = iter([t.grad for t in parts])
    return {
        k: MeshTensor.from_shards(
            [next(grads) for _ in s.q[k].parts], s.mesh, s.q[k].spec, shape=s.q[k].shape
        )
        for k in s.q
    }


# Of the MLP both transforms on three meshes, with every third case each; of layers each transform on one,
# with every second case. So all have run, of the MLP under both transforms. In `make explore`, all.
RUNS = [
    pytest.param(
        axes, transform, placed, model,
        id=f"{model}-{'×'.join(map(str, axes.values()))}-{transform}-{kind}",
    )
    for model in MODELS
    for number, axes in enumerate(MESHES)
    for transform in ("shard", "jit∘shard")
    for placed, kind in ((False, "plain x"), (True, "placed x"))
    if ALL
    or (
        number in ((0, 1, 3) if model == "mlp" else (3 if transform == "shard" else 1,))
        and (transform == "shard") == (placed == (number % 2 == 1))
    )
]  # fmt: skip


@pytest.mark.parametrize(("axes", "transform", "placed_x", "model"), RUNS)
def test_equals_the_plain_function(
    axes: dict[str, int],
    transform: str,
    placed_x: bool,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(equal_layers, "MIN_SAVED", 1)  # a small loop is found, too
    monkeypatch.setattr(equal_layers, "MIN_SAVED_PER_LOOP", 1)
    setting = Setting(axes, transform.split("∘")[0], placed_x, model)
    turn, every = (transform == "shard"), 2
    if model == "mlp":
        turn, every = turn + min(MESHES.index(axes), 2), 3
    start, step = (0, 1) if ALL else (turn % every, every)
    for name, case in islice(CASES.items(), start, None, step):
        try:
            compare(*case(setting))
        except Exception as error:
            raise AssertionError(f"{name} of {model} on {axes}: {error}") from error


@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 2, "b": 2}], ids=["3", "2×2"])
def test_torch_compile_gets_right_numbers(axes: dict[str, int]) -> None:
    s = Setting(axes, "shard", False)
    sharded = s.T(s.f)
    compiled = torch.compile(lambda p, x: sharded(p, x) * 2, backend="aot_eager")
    torch.testing.assert_close(compiled(s.p, s.x), s.f(s.p, s.x) * 2)


def test_inductor_runs_a_sharded_step() -> None:
    s = Setting({"a": 2}, "shard", False)
    run = jit(shard(lambda q, x: sgd(q, grad(s.f)(q, x)), s.mesh))
    compare(run(s.q, s.x), sgd(s.p, grad(s.f)(s.p, s.x)))


def test_gradient_of_inductor_compiled() -> None:
    s = Setting({"a": 3}, "shard", False)
    compare(grad(jit(shard(s.f, s.mesh)))(s.q, s.x), grad(s.f)(s.p, s.x))
