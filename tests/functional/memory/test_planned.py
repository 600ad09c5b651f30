"""Planned memory: the same bits as allocated memory, and nothing that a caller holds is overwritten.

Memory that is not in use is overwritten with NaN before it is used again, in every test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from torch import Tensor

from torchard import checkpoint, jit, policies, repeat, tree
from torchard.functional.memory.arena import release, reserved
from torchard.functional.memory.planned import poisoned
from torchard.testing.strategies import RandomProgram, programs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def planned(fn: Callable[..., Any], **options: Any) -> Any:
    return jit(fn, backend="eager", memory="planned", **options)


def plain(fn: Callable[..., Any]) -> Any:
    return jit(fn, backend="eager")


def same(have: Any, want: Any) -> bool:
    pairs = zip(tree.leaves(have), tree.leaves(want), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


def cloned(values: Any) -> Any:
    return tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, values)


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


@settings(max_examples=examples(ci=60, explore=2000), deadline=None)
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


def block(p: Any, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ p["a"]) @ p["b"]


def stack(params: Any, x: Tensor) -> Tensor:
    for p in params:
        x = checkpoint(block, policy=policies.save_nothing)(p, x)
    return x.square().mean()


def loop(params: Any, x: Tensor) -> Tensor:
    return repeat(block, params, x).square().mean()


def step(loss: Callable[..., Tensor], params: Any, x: Tensor) -> tuple[Any, Tensor]:
    grads, value = torch.func.grad_and_value(loss)(params, x)
    return tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def layers(count: int, width: int = 16) -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [
        {k: torch.randn(width, width, generator=numbers) / 8 for k in ("a", "b")} for _ in range(count)
    ]


def stacked(count: int) -> Any:
    return tree.map(lambda *xs: torch.stack(xs), *layers(count))


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


# -- what a caller can still hold -------------------------------------------------------------------


def test_results_and_views_of_them() -> None:
    """Results that are views of a value, the same value twice, an argument, and a constant."""

    def f(x: Tensor) -> Any:
        y = (x * 2).exp()
        z = y + 1
        return y[1:], y.t(), z, z, x, torch.zeros(3), z.sum(), y.reshape(-1)

    run, x = planned(f), torch.randn(4, 4)
    want = plain(f)(x)
    first = run(x)
    kept = cloned(first)
    for _ in range(2):
        assert same(run(x + 1), plain(f)(x + 1))
    assert same(first, want)
    assert same(first, kept)


def test_results_written_by_the_caller() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2).exp() + 1

    run, x = planned(f), torch.randn(4, 4)
    run(x).zero_()
    assert same(run(x), plain(f)(x))


def test_donated_arguments_that_others_hold() -> None:
    """An argument whose memory another tensor reads is not written over."""

    def f(x: Tensor) -> Tensor:
        return x * 2

    run = planned(f, donate_argnums=0)
    whole = torch.arange(12.0).reshape(3, 4)
    expected, view = whole * 2, whole[0]
    kept = whole.numpy()
    result = run(whole)
    assert torch.equal(result, expected)
    assert torch.equal(view, torch.arange(4.0))
    assert (kept == torch.arange(12.0).reshape(3, 4).numpy()).all()
    part = torch.arange(8.0)
    assert torch.equal(run(part[:4]), torch.arange(4.0) * 2)  # memory of which it has a part
    assert torch.equal(part, torch.arange(8.0))


def test_exception_in_the_middle() -> None:
    calls: list[int] = []

    @torch.library.custom_op("memory_tests::fails_once", mutates_args=())
    def fails_once(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("broken")
        return x + 1

    fails_once.register_fake(torch.empty_like)

    def f(x: Tensor) -> Tensor:
        return fails_once((x * 2).exp()).sum()

    run, x = planned(f), torch.randn(4, 4)
    with pytest.raises(OSError, match="broken") as caught:
        run(x)
    assert "while f ran" in caught.value.__notes__[0]
    before = reserved()
    assert same(run(x), ((x * 2).exp() + 1).sum())
    assert reserved() == before


def test_operand_that_an_operation_keeps() -> None:
    """What an operation of the user's keeps is not written over."""
    seen: list[Tensor] = []

    @torch.library.custom_op("memory_tests::keeps", mutates_args=())
    def keeps(x: Tensor) -> Tensor:
        seen.append(x)
        return x + 1

    keeps.register_fake(torch.empty_like)

    def f(x: Tensor) -> Tensor:
        y = keeps((x * 2).exp())
        return (y * 3).tanh().sum()

    run, x = planned(f), torch.randn(4, 4)
    run(x)
    assert same(seen[0], (x * 2).exp())


def test_call_within_a_call() -> None:
    """An operation that calls the same planned function."""
    depth: list[int] = []

    @torch.library.custom_op("memory_tests::calls", mutates_args=())
    def calls(x: Tensor) -> Tensor:
        if depth:
            return x + 1
        depth.append(1)
        try:
            return run(x)
        finally:
            depth.pop()

    calls.register_fake(torch.empty_like)

    def f(x: Tensor) -> Tensor:
        y = (x * 2).tanh()
        return calls(y + 1) * y

    run, x = planned(f), torch.randn(4, 4)

    def by_hand(x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        y = (x * 2).tanh()
        return inner(y + 1) * y

    assert torch.equal(run(x), by_hand(x, lambda v: by_hand(v, lambda w: w + 1)))


def test_threads() -> None:
    """Threads have blocks of their own."""
    run = planned(lambda x: ((x * 2).tanh() @ x).sum())
    inputs = [torch.randn(64, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    wanted = [((x * 2).tanh() @ x).sum() for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.equal(run(inputs[i]), wanted[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


# -- the arena --------------------------------------------------------------------------------------


def test_shapes_take_turns_in_one_block() -> None:
    release()
    run = planned(lambda x: ((x * 2).tanh() @ x).sum())
    for size in (8, 64, 32):
        run(torch.randn(size, size))
    most = reserved()
    for _ in range(3):
        for size in (8, 64, 32):
            run(torch.randn(size, size))
    assert reserved() == most
    assert most[CPU] == 2 * 64 * 64 * 4  # tanh is written over x * 2; and the product


def test_memory_is_freed_with_the_last_program() -> None:
    release()
    run = planned(lambda x: (x * 2).tanh().sum())
    run(torch.randn(8, 8))
    assert reserved()
    del run
    release()
    assert not reserved()


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
