"""Planned memory: the same bits as allocated memory, of all programs and their derivatives.

Memory that is not in use is overwritten with NaN before it is used again, in every test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from effort import examples
from hypothesis import given, settings
from planned import cloned, layers, loop, plain, planned, same, stack, stacked
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from torchard import tree
from torchard.functional.memory.planned_code import poisoned
from torchard.testing.strategies import RandomProgram, programs


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def gradients(program: Callable[..., Any]) -> Callable[..., Any]:
    """The results of a function and the gradients of its floating inputs."""

    def total(*inputs: Tensor) -> tuple[Tensor, Any]:
        results = program(*inputs)
        floats = [x for x in tree.leaves(results) if x.is_floating_point()]
        return sum((x.square().sum() for x in floats), torch.zeros(())).double(), results

    def run(*inputs: Tensor) -> Any:
        at = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())
        return torch.func.grad(total, at, has_aux=True)(*inputs)

    return run


@settings(max_examples=examples(ci=18, explore=2000), deadline=None)
@given(programs())
def test_random_programs(program: RandomProgram) -> None:
    """Forward alone and with its gradients; what the first call returned is as it was after a second."""
    for fn in (program, gradients(program)):
        run, want = planned(fn), plain(fn)(*program.inputs)
        first = run(*program.inputs)
        assert same(first, want)
        others = [x + 1 if x.is_floating_point() else x for x in program.inputs]
        assert same(run(*others), plain(fn)(*others))
        assert same(first, want)


@settings(max_examples=examples(ci=20, explore=500), deadline=None)
@given(programs(max_steps=5))
def test_gradients_outside(program: RandomProgram) -> None:
    """Under backward, in whatever order the backwards come; under grad, and twice."""
    inputs = [x for x in program.inputs if x.is_floating_point()]
    if len(inputs) < len(program.inputs):
        return

    def loss(*values: Tensor) -> Tensor:
        return _total(program(*values))

    run = planned(loss)
    want = torch.func.grad(plain(loss))(*inputs)
    assert same(torch.func.grad(run)(*inputs), want)
    one, two = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    first, second = run(*one), run(*[x * 1.5 for x in two])
    second.backward()
    first.backward(retain_graph=True)
    assert same(one[0].grad, want)
    first.backward()
    assert same(one[0].grad, want + want)


def _total(values: Any) -> Tensor:
    return sum(x.square().sum() for x in tree.leaves(values) if x.is_floating_point())  # type: ignore


def step(loss: Callable[..., Tensor], params: Any, x: Tensor) -> tuple[Any, Tensor]:
    grads, value = torch.func.grad_and_value(loss)(params, x)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads), value


@pytest.mark.parametrize("loss", [stack, loop])
def test_training_with_donated_arguments(loss: Callable[..., Tensor]) -> None:
    params = stacked(4) if loss is loop else layers(4)
    x = torch.randn(8, 16)

    def run_step(params: Any, x: Tensor) -> Any:
        return step(loss, params, x)

    run, reference = planned(run_step, donate_argnums=0), plain(run_step)
    mine, theirs = cloned(params), params
    for _ in range(4):
        addresses = [p.data_ptr() for p in tree.leaves(mine)]
        mine, value = run(mine, x)
        theirs, want = reference(theirs, x)
        assert torch.equal(value, want)
        assert same(mine, theirs)
        assert sorted(p.data_ptr() for p in tree.leaves(mine)) == sorted(addresses)


@pytest.mark.parametrize("fn", [lambda x: x + x.t(), lambda x: x * x[:1] + x.flip(0), lambda x: x + x[0]])
def test_operands_that_are_also_read_transposed(fn: Callable[[Tensor], Tensor]) -> None:
    def f(x: Tensor) -> Tensor:
        return fn(x * 2).cos()

    x = torch.randn(4, 4)
    assert same(planned(f)(x), f(x))


IMAGE = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(1))
Z = torch.randn(6, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
BITS = torch.arange(-8, 8, dtype=torch.int32)
ODD: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "batch norm of transposed": (
        lambda x: F.batch_norm((x[0] * 2).transpose(1, 2), None, None, training=True).sin(),
        (IMAGE,),
    ),
    "gradient of log_softmax, transposed": (
        torch.func.grad(lambda x: (F.log_softmax((x * 2).T, -1) * x.T).sum()),
        (IMAGE[0, 0],),
    ),
    "gradient of logsigmoid, transposed": (
        torch.func.grad(lambda x: F.logsigmoid((x * 2).T).T.sin().sum()),
        (IMAGE[0, 0],),
    ),
    "reflected, channels last": (
        torch.func.grad(
            lambda x: F.pad((x * 2).to(memory_format=torch.channels_last), (1, 1, 1, 1), "reflect")
            .sin()
            .sum()
        ),
        (IMAGE,),
    ),
    "a loss": (lambda x: F.mse_loss(x * 2, x.cos()) * 2, (IMAGE,)),
    "conjugate in a cat": (lambda z: torch.cat([(z * 2).conj(), z + 1]) * 2, (Z,)),
    "conjugate as real": (lambda z: torch.view_as_real((z * 2).conj() + 1) * 2, (Z,)),
    "other bits in a cat": (
        lambda i, x: torch.cat([(i * 2 + 1).view(torch.float32), x]),
        (BITS, IMAGE[0, 0, 0]),
    ),
    "real parts in a cat": (
        lambda a: torch.cat([torch.view_as_real(torch.complex(a, a)).flatten(), a * 2]) * 2,
        (IMAGE[0, 0, 0],),
    ),
    "complex over a transposed operand": (
        lambda z: (z.view(2, 3) + 1) * (z.view(3, 2) * 2).t() + 1,
        (Z,),
    ),
    "running sums": (lambda a: a @ a.T + a.cos() @ a.T + (a * 2) @ (a.T + 1), (IMAGE[0, 0],)),
    "indices": (lambda x: x[[0, 1], [1, 2]] * 2, (IMAGE[0, 0],)),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_layouts_and_dtypes(case: str) -> None:
    fn, inputs = ODD[case]
    assert same(planned(fn)(*inputs), plain(fn)(*inputs))


def test_tensors_that_are_no_memory() -> None:
    """Subclasses and meta tensors run as they do in allocated memory."""
    run = planned(lambda a: (a * 2).sin() * 2)
    both = TwoTensor(torch.ones(3), torch.zeros(3))
    assert isinstance(run(both), TwoTensor)
    assert run(torch.empty(3, device="meta")).is_meta


def test_a_kernel_that_returns_its_operand() -> None:
    def f(x: Tensor) -> Tensor:
        return (x @ x).exp().abs().sin() * 2 + 1

    x = torch.randn(6, 6)
    fused = fuse(f, lambda h: h.abs(), lambda h: h)
    assert same(planned(fused)(x), plain(fused)(x))


def test_under_other_transforms() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2).tanh().sum()

    run, x = planned(f), torch.randn(3, 4)
    assert same(torch.func.vmap(run)(x), torch.func.vmap(f)(x))
    assert same(torch.func.jvp(run, (x,), (x,)), torch.func.jvp(f, (x,), (x,)))
    assert same(torch.func.hessian(run)(x), torch.func.hessian(f)(x))
    with torch.inference_mode():
        inside = run(x)
    assert same(run(x), inside)
    assert same(torch.compile(run, backend="eager")(x), f(x))
