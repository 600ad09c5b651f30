"""Functions that keep a dtype of their own: what is wrong with them is not their derivative."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchard.testing import check_derivatives, check_dtypes

X = torch.arange(6.0).view(2, 3) / 8 - 0.3
BIAS = torch.ones(3, 3)


def makes_zeros(x: Tensor) -> Tensor:
    state = torch.zeros(3, 3)
    return x @ state  # narrow


def makes_weights(x: Tensor) -> Tensor:
    return F.linear(x, torch.ones(4, 3), torch.ones(4))  # narrow


def closes_over(x: Tensor) -> Tensor:
    return (x.exp() @ BIAS).sum()  # narrow


def casts(x: Tensor) -> Tensor:
    return torch.tanh(x.float()).to(x.dtype)  # narrow


def casts_in_half(x: Tensor) -> Tensor:
    return x * (x.bfloat16() @ x.bfloat16().mT).to(x.dtype).sum()  # narrow


def any_dtype(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (torch.tanh(wide) @ x.new_ones(3, 3).to(wide.dtype)).to(x.dtype)


def narrow_constants(x: Tensor) -> Tensor:
    return x * (x > 0).float() + torch.full((3,), 0.5) / 3 + BIAS[0]


Fn = Callable[[Tensor], Tensor]


def _line(fn: Any) -> str:
    lines, first = inspect.getsourcelines(fn)
    line = next(i for i, line in enumerate(lines, first) if "# narrow" in line)
    return rf"test_converted\.py:{line} in {fn.__name__}"


@pytest.mark.parametrize("fn", [makes_zeros, makes_weights, closes_over])
@pytest.mark.parametrize("check", [check_derivatives, check_dtypes])
def test_a_dtype_of_its_own_is_named_with_argument_line_and_remedy(check: Any, fn: Fn) -> None:
    fn(X)
    with pytest.raises(TypeError, match=_line(fn)) as caught:
        check(fn, X)
    message = str(caught.value)
    assert message.startswith(
        f"{check.__name__} calls fn with args[0], given in float32, in float64, and fn fails: "
    )
    assert "float64[2, 3], float32[" in message
    assert "x.new_zeros(3)" in message


@pytest.mark.parametrize("fn", [casts, casts_in_half])
def test_what_is_computed_in_less_than_float64_has_no_derivatives_to_check(fn: Fn) -> None:
    with pytest.raises(TypeError, match=rf"computes in (float32|bfloat16) at {_line(fn)}.*promote_types"):
        check_derivatives(fn, X)


@pytest.mark.parametrize("fn", [any_dtype, narrow_constants])
def test_functions_for_any_dtype_pass(fn: Fn) -> None:
    check_derivatives(fn, X)


@pytest.mark.parametrize("check", [check_derivatives, check_dtypes])
def test_other_errors_are_the_functions_own(check: Any) -> None:
    def fails(x: Tensor) -> Tensor:
        raise LookupError("no such layer")

    with pytest.raises(LookupError, match="no such layer"):
        check(fails, X)
