"""The program of a run gives what the run gave, whatever it depended on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import effect_programs
import pytest
import torch
from effort import examples
from untraceable import FUNCTIONS

from torchard.functional.core import tree
from torchard.functional.core.errors import PurityError
from torchard.testing.calls import seeded
from torchard.testing.derived import ALL_ORDERS, derived, lack
from torchard.testing.rounding.in_double import InDouble
from torchard.testing.rounding.programs import program_of
from torchard.testing.strategies import random_program

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@contextlib.contextmanager
def suppress_refusals() -> Iterator[None]:
    """Autograd regenerates views by their strides, which not all have a pure form: one in 2,000."""
    try:
        yield
    except PurityError as error:
        assert "has no pure form" in str(error)


def by_backward(fn: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(fn(leaf), leaf, allow_unused=True)
    return x * 0 if gradient is None else gradient


def assert_recorded(fn: Callable[..., Any], *args: Any) -> None:
    """The program of a run, on the inputs it was recorded with, gives the run's results in float64."""
    with seeded(3):
        want = fn(*tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args))
    with seeded(3):
        program, inputs = program_of(fn, args)
    values = InDouble(program).evaluate(inputs)
    for node, x in zip(program.results, tree.leaves(want), strict=True):
        torch.testing.assert_close(values[node], x.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("order", ALL_ORDERS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_program_is_of_what_ran(name: str, order: str) -> None:
    fn = derived(FUNCTIONS[name], order)
    try:
        with seeded(3):
            fn(X)
    except Exception as error:
        assert lack(error), error  # torch has no such derivative
        return
    assert_recorded(fn, X)


@pytest.mark.parametrize("order", ALL_ORDERS)
def test_random_programs(order: str) -> None:
    for seed in range(examples(ci=15, explore=500)):
        program = random_program(seed, steps=seed % 8 + 1)
        assert_recorded(derived(program, order), *program.inputs)


def test_random_programs_that_write_in_place() -> None:
    for seed in range(examples(ci=100, explore=3000)):
        fn, x = effect_programs.program(seed)
        assert_recorded(fn, x)
        try:
            by_backward(fn, x)
        except RuntimeError:  # torch refuses the gradient of what was written over
            continue
        with suppress_refusals():
            assert_recorded(lambda x, fn=fn: by_backward(fn, x), x)


def test_inputs_are_as_they_were_before_the_run() -> None:
    x = torch.ones(3)
    program, inputs = program_of(lambda x: x.mul_(2) + 1, (x,))
    assert inputs[0].tolist() == [1, 1, 1]
    assert InDouble(program).evaluate(inputs)[program.results[0]].tolist() == [3, 3, 3]
    assert x.tolist() == [2, 2, 2]


def test_results_that_no_operation_made_are_constants() -> None:
    program, inputs = program_of(
        lambda x: (x.numpy() * 2, torch.from_numpy(x.numpy() * 2))[1], (X,)
    )
    assert InDouble(program).evaluate(inputs)[program.results[0]].equal(X * 2)
