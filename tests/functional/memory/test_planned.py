"""Planned memory: the same bits as allocated memory, and nothing that a caller holds is overwritten.

Memory that is not in use is overwritten with NaN before it is used again, in every test.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from effort import examples
from hypothesis import given, settings
from planned import HOLDERS, assert_right_in_threads, cloned, same, tensor_of
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from torchard import checkpoint, fuse, jit, policies, repeat, tree
from torchard.functional.memory import arena as arena_module
from torchard.functional.memory.arena import release, reserved
from torchard.functional.memory.planned_code import poisoned
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


def plain_stack(params: Any, x: Tensor) -> Tensor:
    for p in params:
        x = block(p, x)
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


# -- forward and backward -------------------------------------------------------------------------


def outside(run: Any, params: Any, x: Tensor, **options: Any) -> list[Tensor]:
    """The gradients by backward()."""
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    run(tree.unflatten(tree.structure(params), leaves), x).backward(**options)
    return [p.grad for p in leaves if p.grad is not None]


@pytest.mark.parametrize("loss", [stack, loop, plain_stack])
def test_forward_and_backward_share_a_block(loss: Callable[..., Tensor]) -> None:
    params, x = (stacked(4) if loss is loop else layers(4)), torch.randn(8, 16)
    want = outside(plain(loss), params, x)
    release()
    run = planned(loss)
    assert same(outside(run, params, x), want)
    once = reserved()
    for _ in range(3):
        assert same(outside(run, params, x), want)
    assert reserved() == once


def test_a_backward_takes_no_other_block() -> None:
    params, x = layers(4), torch.randn(8, 16)
    release()
    run = planned(plain_stack)
    outside(run, params, x)
    block = reserved()[CPU]
    outside(run, params, x)
    assert reserved()[CPU] == block
    assert run.lower_joint(params, x, argnums=0).memory.block == block
    outside(run, params, x, retain_graph=True)  # which may not overwrite residuals
    assert reserved()[CPU] > block


def test_residuals_that_are_empty() -> None:
    x = torch.randn(0, 3, requires_grad=True)
    planned(lambda x: (x.sin().exp() * x.cos()).sum())(x).backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 3)


def test_many_open_graphs() -> None:
    """Each has a block; afterwards a few are kept."""
    release()
    params, x = layers(2), torch.randn(8, 16)
    run = planned(plain_stack)
    outside(run, params, x)
    one = reserved()[CPU]
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    values = [run(tree.unflatten(tree.structure(params), leaves), x) for _ in range(20)]
    assert reserved()[CPU] >= 20 * one
    del values
    outside(run, params, x)
    assert reserved()[CPU] <= 6 * one


def test_backward_under_autocast() -> None:
    params, x = layers(2), torch.randn(8, 16)
    run, want = planned(plain_stack), outside(plain(plain_stack), params, x)
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    value = run(tree.unflatten(tree.structure(params), leaves), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value.backward()
    assert same([p.grad for p in leaves], want)


def test_batched_gradients_of_autograd() -> None:
    x = torch.randn(3, requires_grad=True)
    y = planned(lambda x: x.sin().exp() * x)(x)
    vectors = torch.randn(2, 3)
    (batched,) = torch.autograd.grad(y, x, vectors, retain_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(y, x, vector, retain_graph=True)[0] for vector in vectors]
    assert torch.allclose(batched, torch.stack(single))


def test_residuals_that_are_still_needed() -> None:
    """Several forwards before their backwards, a retained graph, a graph that is dropped."""
    params, x = layers(3), torch.randn(8, 16)
    run, want = planned(plain_stack), outside(plain(plain_stack), params, x)
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    mine = tree.unflatten(tree.structure(params), leaves)
    values = [run(mine, x) for _ in range(3)]
    run(mine, x * 2)  # dropped
    for value in reversed(values):
        assert same(torch.autograd.grad(value, leaves, retain_graph=True), want)
        assert same(torch.autograd.grad(value, leaves), want)
    grads = torch.autograd.grad(run(mine, x), leaves, create_graph=True)
    assert same(grads, want)
    total = sum(g.square().sum() for g in grads)
    second = torch.autograd.grad(total, leaves)
    leaves2 = [p.detach().clone().requires_grad_() for p in leaves]
    grads2 = torch.autograd.grad(
        plain(plain_stack)(tree.unflatten(tree.structure(params), leaves2), x), leaves2, create_graph=True
    )
    assert same(second, torch.autograd.grad(sum(g.square().sum() for g in grads2), leaves2))


def test_saved_tensor_hooks() -> None:
    """Hooks that keep what is saved, copy it, or put it elsewhere."""
    params, x = layers(3), torch.randn(8, 16)
    run, want = planned(plain_stack), outside(plain(plain_stack), params, x)
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value)
        copies.append(value.clone())
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        assert same(outside(run, params, x), want)
    assert same(outside(run, params, x), want)
    assert same(kept, copies)
    with torch.autograd.graph.saved_tensors_hooks(lambda v: v.double(), lambda v: v.float()):
        assert same(outside(run, params, x), want)
    with torch.autograd.graph.save_on_cpu():
        assert same(outside(run, params, x), want)


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_residuals_that_the_caller_reads(make: Callable[[Tensor], Any]) -> None:
    """What torch shows of a graph stays valid after its backward, and what shares its memory."""
    params, x = layers(3), torch.randn(8, 16)
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    run = planned(plain_stack)
    value = run(tree.unflatten(tree.structure(params), leaves), x)
    seen = [make(v) for v in value.grad_fn.saved_tensors]
    copies = cloned([tensor_of(v) for v in seen])
    value.backward()
    run(layers(3), x)
    assert same([tensor_of(v) for v in seen], copies)


def test_error_in_a_backward() -> None:
    params, x = layers(3), torch.randn(8, 16)
    run, want = planned(plain_stack), outside(plain(plain_stack), params, x)
    leaves = [p.detach().clone().requires_grad_() for p in tree.leaves(params)]
    value = run(tree.unflatten(tree.structure(params), leaves), x)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()
    assert same(outside(run, params, x), want)


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


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_donated_arguments_that_others_hold(make: Callable[[Tensor], Any]) -> None:
    """An argument whose memory something else reads is not written over."""
    run, x = planned(lambda x: x * 2, donate_argnums=0), torch.arange(12.0).reshape(3, 4)
    seen = make(x)
    result = run(x)
    assert torch.equal(result, torch.arange(0.0, 24.0, 2).reshape(3, 4))
    if seen is not x:  # which may not be used
        assert torch.equal(tensor_of(seen), torch.arange(12.0).reshape(3, 4)[: len(tensor_of(seen))])


def test_a_part_of_memory_that_is_donated() -> None:
    run, whole = planned(lambda x: x * 2, donate_argnums=0), torch.arange(8.0)
    assert torch.equal(run(whole[:4]), torch.arange(0.0, 8.0, 2))
    assert torch.equal(whole, torch.arange(8.0))


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
    assert_right_in_threads(run, inputs, wanted)


@pytest.mark.parametrize("fn", [lambda x: x + x.t(), lambda x: x * x[:1] + x.flip(0), lambda x: x + x[0]])
def test_operands_that_are_also_read_transposed(fn: Callable[[Tensor], Tensor]) -> None:
    def f(x: Tensor) -> Tensor:
        return fn(x * 2).cos()

    x = torch.randn(4, 4)
    assert same(planned(f)(x), f(x))


def test_compiled() -> None:
    """Inductor's code: results that are held are not overwritten, and a call allocates nothing else."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x @ x)
        return (y @ x).softmax(-1) @ y, y.sum()

    run, xs = jit(f, memory="planned"), [torch.randn(32, 32) for _ in range(4)]
    wanted = [jit(f)(x) for x in xs]
    results = [run(x) for x in xs]
    assert same(results, wanted)
    assert same(results, cloned(results))
    values = [x.clone().requires_grad_() for x in xs]
    for x in values:
        run(x)[1].backward()
        want = torch.func.grad(lambda v: f(v)[1])(x.detach())
        assert torch.allclose(x.grad, want, rtol=1e-5, atol=1e-5)


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


def test_memory_of_others_is_not_written_to() -> None:
    array = np.ones(4, np.float32)
    result = planned(lambda x: x * 2, donate_argnums=0)(torch.from_numpy(array))
    array[:] = 7
    assert torch.equal(result, torch.full((4,), 2.0))


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


def test_blocks_of_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was put on a stream may still run when the call returns: another stream has its own block."""
    release()
    run, x = planned(lambda x: (x * 2).tanh().sum()), torch.randn(8, 8)
    seen = []
    for stream in ("a", "a", "b", "a"):
        monkeypatch.setattr(arena_module, "_streams", lambda sizes, stream=stream: {CPU: stream})
        run(x)
        seen.append(reserved()[CPU])
    assert seen == [256, 256, 512, 512]


def test_memory_is_freed_with_the_last_program() -> None:
    """Also if a graph is dropped without a backward."""
    gc.collect()
    release()
    run = planned(lambda x: (x * 2).tanh().sum())
    x = torch.randn(8, 8, requires_grad=True)
    value = run(x)
    assert reserved()
    del run, value
    gc.collect()
    if not arena_module.arena._programs:  # of other tests
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
