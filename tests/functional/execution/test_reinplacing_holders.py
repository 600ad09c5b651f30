"""Writes in place are seen by nobody else: callers, autograd, transforms, functions that keep memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reinplaced import AT, X, Y, counts, of_an_argument, transposed, zeros
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torchard import jit, trace
from torchard.functional.execution.codegen import compiled


def allocated(run: Callable[[], Any]) -> list[int]:
    """The sizes of what a call allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    sizes = (event.cpu_memory_usage for event in found.events() or [])
    return [size for size in sizes if size > 0]


@pytest.mark.parametrize("memory", ["allocated", "planned"])
def test_a_donated_cache_is_never_copied(memory: Any) -> None:
    def write(cache: Tensor, at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        cache = cache.index_copy(1, at, x[:, None])
        return cache, cache[:, 0].sum()

    step = jit(write, backend="eager", donate_argnums=0, memory=memory)
    cache = torch.zeros(4, 64, 8)
    want, place = cache.clone(), cache.data_ptr()
    for i in range(3):
        at, x = torch.tensor([i]), torch.full((4, 8), i + 1.0)
        held = [cache]
        del cache
        sizes = allocated(lambda: held.append(step(held.pop(), at, x)[0]))  # noqa: B023
        (cache,) = held
        want.index_copy_(1, at, x[:, None])
        assert torch.equal(cache, want) and cache.data_ptr() == place
        assert i == 0 or max(sizes) < cache.nbytes
    assert step.lower(cache, at, x).peak < 1.5 * cache.nbytes


@pytest.mark.parametrize("hold", [lambda y: y[0], lambda y: y.view(-1), lambda y: y.t()])
def test_what_others_hold_of_a_donated_argument_is_not_written(hold: Callable[..., Any]) -> None:
    step = jit(of_an_argument, backend="eager", donate_argnums=0)
    for _ in range(2):
        y = Y.clone()
        held, before = hold(y), hold(y).clone()
        have = step(y, X)
        assert torch.equal(held, before)
        assert torch.equal(have, of_an_argument(Y, X))


@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad"])
def test_under_transforms_of_torch(transform: str) -> None:
    """What a transform has to see is not written: a base has no batch, where a row may have one."""
    graph = trace(zeros)(Y, X).graph
    assert counts(graph, []) == (3, 2)
    run = compiled(graph)

    def fn(x: Tensor) -> Tensor:
        return run((Y, x))[0]

    xs = torch.stack([X, 2 * X])
    want = torch.stack([zeros(Y, x) for x in xs])
    if transform == "vmap":
        assert torch.equal(torch.func.vmap(fn)(xs), want)
    elif transform == "jvp":
        value, tangent = torch.func.jvp(fn, (X,), (X,))
        assert torch.equal(value, want[0]) and torch.equal(tangent[0], X)
    else:
        assert torch.equal(torch.func.grad(lambda x: (fn(x)[0] * X).sum())(X), X)


def test_where_autograd_follows() -> None:
    """What autograd has saved is not written."""

    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        y[2] = 2.0
        return y

    x = X.clone().requires_grad_()
    graph = trace(fn)(X).graph
    assert counts(graph, []) == (1, 0)
    (grad,) = torch.autograd.grad(compiled(graph)([x])[0].sum(), x)
    assert torch.equal(grad, X.exp().index_fill(0, AT, 0.0))


class _ByProgram(torch.autograd.Function):
    """The identity, whose backward is a program that writes the cotangent into a row."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return compiled(trace(zeros)(Y, X).graph)((Y, cotangent))[0][0]


def test_batched_cotangents() -> None:
    """A row with a batch is not written into a buffer without one."""
    x = X.clone().requires_grad_()
    y: Any = _ByProgram.apply(x)
    (grads,) = torch.autograd.grad(y, x, torch.eye(6), is_grads_batched=True)
    assert torch.equal(grads[:, :5], torch.eye(6)[:, :5])


KEPT: list[Tensor] = []
BUFFER = torch.zeros(4, 6)


@torch.library.custom_op("torchard_writes::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    """A function that keeps its operand."""
    KEPT.append(x)
    return x.sum()


@torch.library.custom_op("torchard_writes::constant", mutates_args=())
def constant(x: Tensor) -> Tensor:
    """A function that returns the same memory in each call."""
    return BUFFER


keep.register_fake(lambda x: x.new_empty(()))
constant.register_fake(lambda x: x.new_empty(4, 6))


def kept(y: Tensor, x: Tensor) -> Tensor:
    y = y * 2
    x = x + keep(y)
    y[0] = x
    return y


def of_a_constant(y: Tensor, x: Tensor) -> Tensor:
    y = constant(y)
    return y.index_copy(0, AT, x[None])


@pytest.mark.parametrize("memory", ["allocated", "planned"])
def test_memory_that_functions_keep_is_not_written(memory: Any) -> None:
    y = jit(kept, backend="eager", memory=memory)(Y, X)
    assert torch.equal(KEPT.pop(), 2 * Y) and torch.equal(y[0], X + 2 * Y.sum())
    have = jit(of_a_constant, backend="eager", memory=memory)(Y, X)
    assert torch.equal(have[2], X) and not BUFFER.any()


@pytest.mark.parametrize("memory", ["allocated", "planned"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Y.clone()[:, :5],
        lambda: Y.clone().t(),
        lambda: X.clone().expand(4, 6),
        lambda: torch.complex(Y, Y).conj(),
    ],
)
def test_donated_arguments_of_any_layout(make: Callable[[], Tensor], memory: Any) -> None:
    def fn(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = y.index_copy(0, AT, (x[: y.shape[1]] + y[0])[None])
        return y, y.view(-1) if y.is_contiguous() else y.reshape(-1)

    step = jit(fn, backend="eager", donate_argnums=0, memory=memory)
    for _ in range(2):
        want, have = fn(make(), X), step(make(), X)
        torch.testing.assert_close(have, want, rtol=0, atol=0)
        assert [x.stride() for x in have] == [x.stride() for x in want]


@pytest.mark.parametrize("memory", ["allocated", "planned"])
def test_donated_inference_tensors(memory: Any) -> None:
    step = jit(of_an_argument, backend="eager", donate_argnums=0, memory=memory)
    with torch.inference_mode():
        y, again = Y.clone(), Y.clone()
        assert torch.equal(step(again, X), of_an_argument(Y, X))
    assert torch.equal(step(y, X), of_an_argument(Y, X))


def test_results_that_share_memory_stay_views() -> None:
    """Autograd notices writes to one through the other; a single one can be donated again."""

    def two(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = y.t().index_copy(1, AT, x[:, None]).t()
        return y, y[0]

    y, row = jit(two, backend="eager", donate_argnums=0)(Y.clone(), X)
    w = torch.ones(6, requires_grad=True)
    product = (row * w).sum()
    y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    step = jit(transposed, backend="eager", donate_argnums=0)
    y = step(Y.clone(), X)
    place = y.data_ptr()
    assert transposed(Y, X).equal(y)
    del product, row
    assert step(y, X).data_ptr() != place  # the product is new


def test_halves_write_what_is_their_own() -> None:
    """What the forward saves is not written by the backward, whose peak says so."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = (x * w).exp()  # saved
        return (y * w).sum()

    program = jit(torch.func.grad(loss), backend="eager").lower(X, X)
    assert program.peak > 0
    joint = jit(lambda x: zeros(Y, x.sin()).square().sum(), backend="eager").lower_joint(X)
    assert joint.peak >= 2 * Y.nbytes
