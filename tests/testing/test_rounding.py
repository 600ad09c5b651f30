"""Bounds of rounding errors hold for what is right, and are tight enough to find what is wrong."""

from __future__ import annotations

import pytest
import torch
from effort import examples
from hypothesis import assume, given, settings
from random_programs import Example, programs

from torchard.testing import equal

NARROW = [torch.float32, torch.bfloat16, torch.float16]


def _cast(example: Example, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in example.inputs)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@settings(max_examples=examples(ci=8, explore=300))
@given(example=programs(most=4))
def test_a_program_is_within_its_bounds(dtype: torch.dtype, example: Example) -> None:
    # torch's layer_norm of single elements is not 0 in 16 bits: x * scale - mean * scale, each rounded.
    assume(not any("layer_norm" in line for line in example.lines))
    args = _cast(example, dtype)
    try:
        example(*args)
    except RuntimeError:  # it casts to float64 inside, and torch refuses the mixture
        assume(False)
    equal(example, example, *args, orders=("value", "gradient"))


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
