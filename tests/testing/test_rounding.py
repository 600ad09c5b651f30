"""Bounds of rounding errors hold for what is right, and are tight enough to find what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from effort import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchard.testing import check_dtypes, equal, idempotent
from torchard.testing.strategies import programs

NARROW = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@settings(max_examples=examples(ci=6, explore=300))
@given(data=st.data())
def test_a_program_is_within_its_bounds(dtype: torch.dtype, data: st.DataObject) -> None:
    program = data.draw(programs(max_steps=4, dtype=dtype))
    # torch's layer_norm of single elements is not 0 in 16 bits: x * scale - mean * scale, each rounded.
    assume("layer_norm" not in program.source)
    equal(program, program, *program.inputs, orders=("value", "gradient"))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_small_integers_must_be_equal(dtype: torch.dtype) -> None:
    x, w = (torch.arange(12, dtype=dtype) % 3).view(3, 4), torch.ones(4, 2, dtype=dtype)
    report = equal(lambda x, w: x @ w + 1, lambda x, w: x @ w + 1, x, w)
    assert all(row.bound == 0 == row.error for row in report)
    with pytest.raises(AssertionError, match=r"at \[0, 0\]"):
        equal(lambda x, w: x @ w + 1.25, lambda x, w: x @ w + 1, x, w, orders=["value"])


@pytest.mark.parametrize("off", [1e-5, 1e-3])
def test_what_is_off_by_more_than_rounding_is_found(off: float) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    equal(
        lambda x: torch.nn.functional.gelu(x) @ x.mT,
        lambda x: torch.nn.functional.gelu(x) @ x.mT,
        x,
    )
    with pytest.raises(AssertionError, match="differs"):
        equal(
            lambda x: torch.nn.functional.gelu(x) @ x.mT * (1 + off),
            lambda x: torch.nn.functional.gelu(x) @ x.mT,
            x,
        )


# Functions and values, of which one jumps with a rounding, or is next to a pole; never the third.
UNSTABLE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[float]]] = {
    "round": (lambda x: (x / 0.1).round() * 0.1, [0.25, 1.3, -0.71]),
    "remainder": (lambda x: (x * 0.1).remainder(0.3), [3.0, 1.0, 2.0]),
    "atan2": (lambda x: torch.atan2(x.sin(), x.cos()), [0.3, 3.14159265, -1.0, 2.0]),
    "pole": (lambda x: 1 / (x * 0.1 - 0.7), [7.00001, 3.0, 1.0, 9.0]),
}


@pytest.mark.parametrize("name", UNSTABLE)
def test_an_unstable_element_does_not_excuse_the_others(name: str) -> None:
    fn, values = UNSTABLE[name]
    x = torch.tensor(values)
    assert equal(fn, fn, x, orders=["value"]).good
    with pytest.raises(AssertionError, match="times its bound"):
        equal(lambda x: fn(x) + 1e-3 * (x == x[2]), fn, x, orders=["value"])


def test_elements_that_only_fn_rounds_have_its_bounds() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 1, x, x * 1.1)  # the second element is as it was given

    x = torch.tensor([0.3, 7.0, 0.7])
    assert equal(lambda x: reference(x) / 3 * 3.3 / 1.1, reference, x, orders=["value"]).good
    assert equal(lambda x: reference(x) / 3 * 3.3 / 1.1, reference, x.bfloat16(), orders=["value"]).good
    with pytest.raises(AssertionError, match="times its bound"):
        equal(lambda x: reference(x) + 1e-5 * (x > 1), lambda x: reference(x), x, orders=["value"])


def test_the_exact_value_in_double_is_rounded_too() -> None:
    def by_erf(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.erf(x / 2**0.5)) / 2

    x = torch.tensor([0.3, -38.43168593782809], dtype=torch.float64)  # torch's kernel is off by an eps
    assert equal(torch.nn.functional.gelu, by_erf, x).good


@pytest.mark.parametrize("name", ["floor", "ceil", "trunc", "round", "sign"])
def test_an_element_that_is_at_no_jump_of_the_reference_is_exact(name: str) -> None:
    step, x = getattr(torch, name), torch.tensor([0.1, -0.3, 2.0, 0.0])
    with pytest.raises(AssertionError, match=r"at \[2\], where nothing is rounded"):
        equal(lambda x: step(x) + (x == 2), step, x)
    assert equal(lambda x: step(x * 1.1), lambda x: step(x / 10 * 11), x * 1.3).good


def test_steps_of_what_is_rounded_are_integers() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return (x + 0.5).floor() + 0.5

    with pytest.raises(AssertionError, match="not idempotent"):
        idempotent(halves, torch.tensor([0.3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_that_is_large_beside_its_deviations(dtype: torch.dtype) -> None:
    norm = torch.nn.functional.instance_norm
    x = torch.tensor([[[100.0, 101.0], [3.0, -2.0]]])
    assert check_dtypes(norm, x, dtypes=[dtype]).good
    with pytest.raises(AssertionError, match="times its bound"):
        equal(lambda x: norm(x) * (1 + 1e-3), norm, x, orders=["value"])
