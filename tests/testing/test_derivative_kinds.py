"""check_derivatives without forward mode, at kinks and jumps, at random, straight through."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torchard.testing import check_derivatives, equal

X = torch.tensor([0.5, -1.5, 2.25], dtype=torch.float64)


class OldStyle(torch.autograd.Function):
    """The cube, without setup_context and jvp; its derivative is right for factor 3."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.factor * ctx.saved_tensors[0] ** 2, None


class RoundStraightThrough(torch.autograd.Function):
    """Rounding, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_without_forward_mode_reverse_mode_is_compared_alone() -> None:
    report = check_derivatives(lambda x: OldStyle.apply(x, 3.0), X)
    assert [(r.forward, r.reverse) for r in report] == [(False, True)] * 2
    assert "order 2: reverse mode against finite differences; no forward mode: You must" in str(report)
    with pytest.raises(AssertionError, match="reverse mode of order 1 is wrong"):
        check_derivatives(lambda x: OldStyle.apply(x, 3.00003), X)
    with pytest.raises(NotImplementedError, match=r"no forward mode of order 1.*Leave modes out"):
        check_derivatives(lambda x: OldStyle.apply(x, 3.0), X, modes=["forward"])


def test_forward_derivatives_inside_of_the_function_nest() -> None:
    def laplacian(x: Tensor) -> Tensor:
        return torch.func.hessian(lambda y: y.sin().prod())(x).trace()

    assert all(r.forward for r in check_derivatives(laplacian, X))


@pytest.mark.parametrize("fn", [torch.relu, torch.abs, torch.sign, lambda x: x.amax()])
def test_kinks_are_allowed_or_a_failure(fn: Callable[[Tensor], Tensor]) -> None:
    at = torch.zeros(2)
    check_derivatives(fn, at, order=1)
    with pytest.raises(AssertionError, match=r"at \[0?\] of result 0 is a (kink|jump)"):
        check_derivatives(fn, at, order=1, kinks=False)
    check_derivatives(fn, X, order=1, kinks=False)


def test_kinks_are_counted() -> None:
    assert check_derivatives(torch.relu, torch.zeros(2), order=1)[0].kinks == 2


def test_straight_through_estimators_are_compared_with_what_they_declare() -> None:
    check_derivatives(RoundStraightThrough.apply, X, straight_through=lambda x: x)
    with pytest.raises(AssertionError, match="reverse mode of order 1 is wrong"):
        check_derivatives(RoundStraightThrough.apply, X)
    with pytest.raises(AssertionError, match="reverse mode of order 1 is wrong"):
        check_derivatives(RoundStraightThrough.apply, X, straight_through=lambda x: 2 * x)
    with pytest.raises(ValueError, match=r"straight_through returns .* \[\[\]\], and fn of \[\[3\]\]"):
        check_derivatives(RoundStraightThrough.apply, X, straight_through=torch.sum)


def test_dropout_has_one_mask_and_other_randomness_is_named() -> None:
    state = torch.get_rng_state()
    check_derivatives(lambda x: F.dropout(x.sin()), X.repeat(9))
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(AssertionError, match="fn is random: two calls with the same arguments differ"):
        check_derivatives(lambda x: x * python_random.random(), X)


def test_without_a_floating_result_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match=r"no result of fn is a floating tensor.*returns torch\.int64"):
        check_derivatives(torch.argmax, X)


def test_complex_values_pass_and_their_absolute_value_has_a_kink() -> None:
    z = torch.tensor([1 + 2j, -0.5j], dtype=torch.complex128)
    check_derivatives(lambda z: (z * z.conj() + z.exp()), z)
    check_derivatives(torch.abs, z)
    check_derivatives(torch.abs, 0 * z, order=1)
    with pytest.raises(AssertionError, match=r"at \[0\] of result 0 is a kink"):
        check_derivatives(torch.abs, 0 * z, order=1, kinks=False)


def test_writing_to_an_argument_changes_no_other_call() -> None:
    check_derivatives(lambda x: x.mul_(2).sin(), X)
    assert X.tolist() == [0.5, -1.5, 2.25]


def test_conjugate_views_are_arguments() -> None:
    z = torch.tensor([1 + 2j, -0.5 + 0.3j])
    assert equal(lambda z: z.conj() * 2, lambda z: 2 * z.conj(), z.conj()).good
    assert equal(lambda x: x * x, torch.square, z.conj().imag).good
