"""What a caller can still hold of a call in planned memory, or in the middle of one, is not overwritten.

Memory that is not in use is overwritten with NaN before it is used again, in every test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from planned import HOLDERS, assert_right_in_threads, cloned, plain, planned, same, tensor_of
from torch import Tensor

from torchard.functional.memory.arena import reserved
from torchard.functional.memory.planned_code import poisoned


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


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


def test_memory_of_others_is_not_written_to() -> None:
    array = np.ones(4, np.float32)
    result = planned(lambda x: x * 2, donate_argnums=0)(torch.from_numpy(array))
    array[:] = 7
    assert torch.equal(result, torch.full((4,), 2.0))
