"""Infinities in a program leave the other values comparable: a mistake beside them is found."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from masked_models import DTYPES, MASKED, MISTAKES, of_rows, rows

from torchard.testing import equal, localize
from torchard.testing import strategies as ts
from torchard.testing.rounding.bounds import Expected


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_a_right_model_passes(name: str, dtype: torch.dtype) -> None:
    model = of_rows(MASKED[name])
    report = equal(model, model, rows(dtype))
    assert all(math.isfinite(row.bound) for row in report)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["value", "gradient", "jvp"])
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", MASKED)
def test_a_mistake_is_found(name: str, mistake: str, order: str, dtype: torch.dtype) -> None:
    model = MASKED[name]
    with pytest.raises(AssertionError, match=r"times its bound|nothing is rounded"):
        equal(of_rows(model, mistake), of_rows(model), rows(dtype), orders=[order])


def test_infinite_inputs() -> None:
    x = torch.tensor([0.3, 1.7, -torch.inf])
    with pytest.raises(AssertionError, match="times its bound"):
        equal(lambda x: 7 * x.softmax(0), lambda x: x.softmax(0), x, orders=("value",))
    found = localize(lambda x: 7 * x.softmax(0), lambda x: x.softmax(0), x)
    assert "aten.mul" in str(found)


def test_nothing_is_right_for_want_of_a_bound() -> None:
    """A pole: the difference of equal numbers is zero, and roundings make it anything."""
    value = Expected(torch.ones(2), torch.tensor([torch.inf, 1e-6]), torch.tensor([True, False]))
    assert value.excess(torch.ones(2)).tolist() == [0, 0]
    assert value.excess(torch.tensor([1.5, 1.0])).tolist() == [torch.inf, 0]
    assert value.excess(torch.tensor([torch.nan, torch.nan])).tolist() == [0, torch.inf]


@pytest.mark.parametrize("pick", [torch.amax, lambda x, d: x.max(d).values, torch.logcumsumexp])
def test_gradients_of_what_picks_a_value_have_bounds(pick: Callable[..., torch.Tensor]) -> None:
    x, w = torch.randn(4, 6), torch.randn(6, 6)
    report = equal(lambda x: pick(x @ w, 1), lambda x: pick(x @ w, 1), x, orders=("value", "gradient"))
    assert all(math.isfinite(row.bound) for row in report)


def test_random_programs_have_bounds() -> None:
    """Programs agree with themselves; almost all values are bounded, those with masked rows too."""
    without = 0
    for seed in range(40):
        program = ts.random_program(seed)
        report = equal(program.function, program.function, *program.inputs, orders=("value",))
        without += any(math.isinf(row.bound) for row in report)
    assert without <= 1
