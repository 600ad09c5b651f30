"""torch.compile around functions of ours, which run as they are, and what it compiled inside of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from torch import Tensor, nn
from torch.func import grad

from torchard import Mesh, P, accumulate, checkpoint, functionalize, jit, shard, shard_map
from torchard.functional.torch_internals import uncompiled

MESH = Mesh({"x": 2}, virtual=True)
X = torch.tensor([[0.5, 1.0, -2.0], [2.0, -1.0, 3.0]])
Fn = Callable[..., Any]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="eager", **options)


def full(value: Any) -> Tensor:
    return value.full() if hasattr(value, "full") else value


TRANSFORMS: dict[str, Callable[[Fn], Fn]] = {
    "functionalized": lambda f: f,
    "jit": lambda f: jit(f, backend="eager"),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "shard": lambda f: shard(f, MESH),
    "shard_map": lambda f: shard_map(f, MESH, (P(), P("x")), P("x")),
    "accumulate": lambda f: accumulate(f, 2, batch=(None, 0)),
    "nested": lambda f: jit(lambda p, x: checkpoint(fuse(f))(p, x) * 1, backend="eager"),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functions_within_torch_compile_are_run_as_they_are(transform: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    fn, params = functionalize(module)
    run, want = TRANSFORMS[transform](fn), module(X).detach()
    torch.testing.assert_close(full(compiled(run)(params, X)), want)
    if transform not in ("shard", "shard_map"):
        around = compiled(lambda p, x: run(p, x * 2).square() + x.sum())
        torch.testing.assert_close(around(params, X), module(X * 2).square().detach() + X.sum())


# Dynamo's own access, where a graph continues with a value that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_gradients_pass_through() -> None:
    fn, params = functionalize(nn.Linear(3, 3))

    def loss(p: Any, x: Tensor) -> Tensor:
        return fn(p, x.sin()).square().sum()

    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    compiled(loss)(leaves, X).backward()
    found = {k: v.grad for k, v in leaves.items()}
    torch.testing.assert_close(found, grad(loss)(params, X))


@pytest.mark.parametrize("transform", ["functionalized", "checkpoint"])
def test_a_full_graph_is_refused_with_the_remedy(transform: str) -> None:
    fn, params = functionalize(nn.Linear(3, 3))
    run = TRANSFORMS[transform](fn)
    with pytest.raises(RuntimeError, match=r"torchard\.jit\(fn\) does"):
        compiled(lambda p, x: run(p, x) * 2, fullgraph=True)(params, X)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.product = compiled(lambda x, w: (x @ w).sin())

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.inner.weight)


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    @torch.compile(backend="eager")
    def product(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x[:, None]).sum(1)


def by_compile() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module[0].compile(backend="eager")
    return module


COMPILED: dict[str, Callable[[], nn.Module]] = {
    "a module": lambda: compiled(nn.Sequential(nn.Linear(3, 3), nn.Tanh())),
    "a part": lambda: nn.Sequential(compiled(nn.Linear(3, 3)), nn.Tanh()),
    "module.compile()": by_compile,
    "a decorated forward": Decorated,
    "a decorated method": Method,
    "a function": Held,
}


@pytest.mark.parametrize("what", COMPILED)
@pytest.mark.parametrize("transform", ["functionalized", "jit", "checkpoint", "shard"])
def test_what_torch_compile_made_runs_as_it_was_written(what: str, transform: str) -> None:
    module = COMPILED[what]()
    want = module(X).detach()
    fn, params = functionalize(module)

    def loss(f: Fn) -> Fn:
        return lambda p: full(f(p, X)).square().sum()

    run = TRANSFORMS[transform](fn)
    torch.testing.assert_close(full(run(params, X)), want)
    total, parameters = module(X).square().sum(), list(module.parameters())
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    for name, gradient in zip(params, gradients, strict=True):
        found = grad(loss(run if transform != "shard" else checkpoint(run)))(params)[name]
        torch.testing.assert_close(
            full(found), torch.zeros_like(found) if gradient is None else gradient
        )


def test_threads_leave_the_compiler_as_it_was() -> None:
    calls = []
    fn = torch.compile(lambda x: x * 2, backend=lambda graph, _: calls.append(1) or graph)
    inside, outside = threading.Event(), threading.Event()

    def other() -> None:
        with uncompiled():
            inside.set()
            outside.wait()

    thread = threading.Thread(target=other)
    with uncompiled():
        thread.start()
        inside.wait()
    fn(X)  # the other thread is still in a call
    assert not calls
    outside.set()
    thread.join()
    fn(X)
    assert calls


# Dynamo itself reads the .grad of what it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.grad])
def test_functions_without_this_library_compile_as_without_it(transform: Any) -> None:
    """torch.func reads trees through a function of ours, which is not compiled by itself."""

    def total(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return (x.sin() * 2).sum()

    torch.testing.assert_close(compiled(transform(total))(X), transform(total)(X))
