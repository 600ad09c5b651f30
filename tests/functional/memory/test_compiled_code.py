"""Inductor's code in planned memory: its values, and nothing that a caller holds is overwritten.

Memory that is not in use is overwritten with NaN before it is used again, in every test but those that
count allocations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from planned import assert_right_in_threads, cloned, same
from torch import Tensor

from torchard import jit, nn, optim, repeat, tree
from torchard.functional import torch_internals as internals
from torchard.functional.core.spans import Span
from torchard.functional.memory import compiled_code
from torchard.functional.memory.arena import reserved
from torchard.functional.memory.compiled_code import AllocationRequest, CompiledPlan
from torchard.functional.memory.planned_code import poisoned
from torchard.functional.memory.pool import Pool
from torchard.testing.strategies import RandomProgram, programs

ROWS = 64


@pytest.fixture
def poison() -> Iterator[None]:
    with poisoned():
        yield


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """A pool of this test alone."""
    own = Pool(1 << 30)
    monkeypatch.setattr(compiled_code, "pool", own)
    return own


def planned(fn: Callable[..., Any], **options: Any) -> Any:
    return jit(fn, memory="planned", **options)


def mlp(layers: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    for p in layers:
        x = x + nn.gelu(x @ p["up"]) @ p["down"]
    return x.square().mean()


def rolled(layers: list[dict[str, Tensor]], x: Tensor) -> Tensor:
    stacked = {name: torch.stack([p[name] for p in layers]) for name in ("up", "down")}
    return repeat(lambda p, x: x + nn.gelu(x @ p["up"]) @ p["down"], stacked, x).square().mean()


def weights(count: int = 3, width: int = 32) -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [
        {
            "up": torch.randn(width, 2 * width, generator=numbers) / 8,
            "down": torch.randn(2 * width, width, generator=numbers) / 8,
        }
        for _ in range(count)
    ]


def batch(seed: int = 1, width: int = 32) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed))


def training(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    optimizer = optim.adamw(1e-2)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads, value = torch.func.grad_and_value(loss)(params, x)
        return *optimizer.update(grads, state, params), value

    return step


# -- values -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("poison")
@settings(max_examples=examples(ci=5, explore=100), deadline=None)
@given(programs())
def test_random_programs(program: RandomProgram) -> None:
    """The first call and later ones; what one returned is as it was after the next."""
    run, plain = planned(program), jit(program)
    first = run(*program.inputs)
    kept = cloned(first)
    assert same(first, plain(*program.inputs))
    for delta in (1, 2, 3):
        others = [x + delta if x.is_floating_point() else x for x in program.inputs]
        assert same(run(*others), plain(*others))
    assert same(first, kept)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(("loss", "donated"), [(mlp, (0, 1)), (rolled, ())])
def test_training(loss: Callable[..., Tensor], donated: tuple[int, ...]) -> None:
    """Whole programs and those of regions: every step the bits of allocated memory."""
    step = training(loss)
    run, plain = planned(step, donate_argnums=donated), jit(step)
    params = weights()
    state = optim.adamw(1e-2).init(params)
    mine, theirs = cloned((params, state)), (params, state)
    for number in range(4):
        *mine, a = run(*mine, batch(number))
        *theirs, b = plain(*theirs, batch(number))
        assert torch.equal(a, b)
    assert same(mine, theirs)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("loss", [mlp, rolled])
def test_gradients_outside(loss: Callable[..., Tensor]) -> None:
    """Residuals stay valid: of a retained graph, of several open graphs, and after other calls."""
    run, params = planned(loss), tree.map(lambda p: p.requires_grad_(), weights())
    leaves = tree.leaves(params)
    wanted = [torch.autograd.grad(loss(params, batch(i)), leaves) for i in range(3)]
    for _ in range(3):
        values = [run(params, batch(i)) for i in range(3)]
        for value, want in zip(values, wanted, strict=True):
            for _ in range(2):
                grads = torch.autograd.grad(value, leaves, retain_graph=True)
                torch.testing.assert_close(grads, want, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("poison")
def test_inputs_of_other_strides() -> None:
    def f(x: Tensor) -> Tensor:
        return (x @ x).tanh().softmax(-1) @ x

    run, plain = planned(f), jit(f)
    for x in (batch(i, ROWS).t() if i % 2 else batch(i, ROWS) for i in range(6)):
        assert same(run(x), plain(x))


# -- what others hold -------------------------------------------------------------------------------


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("first", [0, 1, 2])
def test_operand_that_an_operator_keeps(first: int) -> None:
    """From its first call on, from the one on that is observed, or from a later one on."""
    calls: list[int] = []
    seen: list[Tensor] = []

    @torch.library.custom_op("compiled_memory_tests::keeps", mutates_args=())
    def keeps(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > first:
            seen.append(x[1:])
        return x + 1

    keeps.register_fake(torch.empty_like)
    run = planned(lambda x: (keeps((x * 2).exp()) * 3).tanh() @ x)
    inputs = [batch(i, ROWS) for i in range(5)]
    for x in inputs:
        run(x)
    for x, kept in zip(inputs[first:], seen, strict=True):
        torch.testing.assert_close(kept, (x * 2).exp()[1:])


@pytest.mark.usefixtures("poison")
def test_operator_that_fails_or_calls_the_same_program() -> None:
    depth: list[int] = []
    fail: list[int] = []

    @torch.library.custom_op("compiled_memory_tests::calls", mutates_args=())
    def calls(x: Tensor) -> Tensor:
        if fail:
            raise OSError("broken")
        if depth:
            return x + 1
        depth.append(1)
        try:
            inner: Tensor = run(x)
            return inner
        finally:
            depth.pop()

    calls.register_fake(torch.empty_like)

    def f(x: Tensor) -> Tensor:
        y = (x @ x).tanh()
        return (calls(y + 1) @ y).sin() @ y

    def by_hand(x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        y = (x @ x).tanh()
        return (inner(y + 1) @ y).sin() @ y

    run, x = planned(f), batch(1, ROWS) / ROWS
    for _ in range(4):
        want = by_hand(x, lambda v: by_hand(v, lambda w: w + 1))
        torch.testing.assert_close(run(x), want)
        fail.append(1)
        with pytest.raises(OSError, match="broken"):
            run(x)
        fail.clear()


@pytest.mark.usefixtures("poison")
def test_threads() -> None:
    def f(x: Tensor) -> Tensor:
        return ((x @ x).tanh() @ x).softmax(-1) @ x

    run, inputs = planned(f), [batch(i, ROWS) for i in range(4)]
    assert_right_in_threads(run, inputs, [jit(f)(x) for x in inputs])


# -- what is allocated ------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [mlp, rolled])
def test_a_steady_step_allocates_nothing_large(
    loss: Callable[..., Tensor], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Intermediates are in a block that stays; results take the memory of what was donated."""
    asked: list[int] = []
    whole = compiled_code.empty_cpu

    def counted(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        made = whole(shape, strides, dtype)
        asked.append(made.nbytes)
        return made

    added: list[int] = []
    add = Pool._added

    def counted_add(self: Pool, nbytes: int) -> Any:
        added.append(nbytes)
        return add(self, nbytes)

    monkeypatch.setattr(compiled_code, "empty_cpu", counted)
    monkeypatch.setattr(Pool, "_added", counted_add)
    run, params = planned(training(loss), donate_argnums=(0, 1)), weights()
    values = [params, optim.adamw(1e-2).init(params)]
    for _ in range(5):
        values = run(*values, batch())[:2]
    assert max(asked) >= 1024  # the first calls: one compiles, the next is observed
    asked.clear()
    added.clear()
    before = reserved()
    for _ in range(3):
        values = run(*values, batch())[:2]
    assert not added and max(asked, default=0) < 1024
    assert reserved() == before


def test_a_compiler_may_hold_values(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of regions, in a reference cycle for example: they have places in the block."""
    held: list[list[Tensor]] = []
    compile_graph = internals.compile_graph

    def holding(module: Any, parts: Sequence[Tensor], *options: Any) -> Any:
        held.append(list(parts))
        return compile_graph(module, parts, *options)

    monkeypatch.setattr(internals, "compile_graph", holding)
    run, params = planned(training(rolled), donate_argnums=(0, 1)), weights()
    values = [params, optim.adamw(1e-2).init(params)]
    for _ in range(4):
        values = run(*values, batch())[:2]
    assert held and not pool._by_number


# -- plans and pools --------------------------------------------------------------------------------


def test_code_that_allocates_otherwise_is_refused() -> None:
    plan = CompiledPlan([AllocationRequest((4,), (1,), torch.float32)], [0], [Span(0, 0, 16)])
    block = {torch.device("cpu"): torch.empty(plan.packing.size, dtype=torch.uint8)}
    take = plan.replay(plan.places(block))
    with pytest.raises(AssertionError, match=r"float64\[4\] where it allocated torch.float32\[4\]"):
        take((4,), (1,), torch.float64)
    assert plan.replay(plan.places(block))((4,), (1,), torch.float32).shape == (4,)


def test_search_for_free_memory_is_short(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand blocks that are kept cost a take a few looks, and those that come free are found."""
    looks: list[int] = []
    kind: Any = type(pool._added(1))
    is_free = kind.is_free
    monkeypatch.setattr(kind, "is_free", lambda self: looks.append(1) or is_free(self))

    def taken() -> Tensor:
        return pool.empty((64, 64), (64, 1), torch.float32, 1 << 14)

    kept = [taken() for _ in range(1000)]
    looks.clear()
    places = set()
    for _ in range(1000):
        places.add(taken().data_ptr())
    assert len(looks) < 12 * 1000
    assert len(places) <= 1000 // 4 + 1  # until all are looked at again
    del kept
