"""check_derivatives where derivatives end: kinks that meet, infinite values, what torch cannot take."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from effort import examples
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from torchard.functional.core import user_lines
from torchard.testing import check_derivatives, equal

X = torch.tensor([0.5, -1.5, 2.25], dtype=torch.float64)


class Once(torch.autograd.Function):
    """The cube, whose backward may not be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 3 * ctx.saved_tensors[0] ** 2


class WrongCube(Once):
    """The cube, with a gradient of another factor."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2 * ctx.saved_tensors[0] ** 2


class ProductInBoth(torch.autograd.Function):
    """A product, whose backward is right where both factors require gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y, g * x if ctx.needs_input_grad[0] else g * y


class ProductByChoice(torch.autograd.Function):
    """A product, whose backward is wrong where these factors alone require gradients."""

    @staticmethod
    def forward(ctx: Any, wrong: tuple[bool, ...], *factors: Tensor) -> Tensor:
        ctx.save_for_backward(*factors)
        ctx.wrong = wrong
        return torch.stack(factors).prod(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        found = [g * torch.stack(ctx.saved_tensors).prod(0) / x for x in ctx.saved_tensors]
        factor = 2 if ctx.needs_input_grad[1:] == ctx.wrong else 1
        return None, *(factor * x for x in found)


@pytest.mark.parametrize("weight, bias", [(0.0, 0.0), (1.0, -1.0)])
def test_kinks_of_hidden_units_may_meet(weight: float, bias: float) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    for p in net.parameters():
        nn.init.constant_(p, weight)
    nn.init.constant_(net[0].bias, bias)
    x = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert check_derivatives(net, x)[1].kinks
    net.double()
    with pytest.raises(AssertionError, match="mode of order 1 is wrong"):
        check_derivatives(lambda x: (net(x), x.sin() + 1e-3 * (x - x.detach())), x)


class SumOfMagnitudes(torch.autograd.Function):
    """Its derivative at zero is between no slopes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs().sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * torch.where(ctx.saved_tensors[0] == 0, 50.0, ctx.saved_tensors[0].sign())


def test_a_derivative_where_kinks_meet_is_near_some_slope() -> None:
    check_derivatives(lambda x: x.abs().sum(), torch.zeros(3))
    with pytest.raises(AssertionError, match="reverse mode of order 1 is wrong"):
        check_derivatives(SumOfMagnitudes.apply, torch.zeros(3), order=1)


@pytest.mark.parametrize("seed", range(4))
def test_medians_of_equal_elements_meet_kinks(seed: int) -> None:
    check_derivatives(torch.median, torch.zeros(3), order=1, seed=seed)
    check_derivatives(lambda x: x.kthvalue(2).values, torch.zeros(3), order=1, seed=seed)


def test_kinks_that_cancel_are_none() -> None:
    """The derivative in torch is 0 there, that of the function is 1."""
    with pytest.raises(AssertionError, match="forward mode of order 1 is wrong"):
        check_derivatives(lambda x: x.relu() - (-x).relu(), torch.zeros(3))


def whole_numbers(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 3), (3, 4), (4, 4), (4, 2)
    return [torch.randint(-1, 2, shape, generator=generator).double() for shape in shapes]


@pytest.mark.parametrize("activation", [torch.relu, F.leaky_relu, torch.abs, F.hardtanh, F.elu])
def test_networks_of_whole_numbers_are_right(activation: Any) -> None:
    def network(x: Tensor, first: Tensor, second: Tensor, last: Tensor) -> Tensor:
        return activation(activation(x @ first) @ second) @ last

    for seed in range(examples(3, 60)):
        check_derivatives(network, *whole_numbers(seed), seed=seed)


class SquareButOne(torch.autograd.Function):
    """The square, without a gradient in the first element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 2 * x * (torch.arange(len(x)) > 0)


def test_kinks_hide_nothing_that_is_wrong_beside_them() -> None:
    x, kinks = torch.linspace(0.5, 1, 100), torch.zeros(3000)
    for modes in (["forward", "reverse"], ["reverse"]):
        check_derivatives(lambda x, y: x.square().sum() + y.relu().sum(), x, kinks, modes=modes)
    with pytest.raises(AssertionError, match="reverse mode of order 1 is wrong"):
        check_derivatives(
            lambda x, y: SquareButOne.apply(x).sum() + y.relu().sum(), x, kinks, order=1
        )


def test_elements_without_differences_are_counted() -> None:
    """A cusp: slopes grow towards it, on both sides."""
    report = check_derivatives(
        lambda x: (x.relu() + x.abs() + 1e-200).sqrt(), torch.zeros(2), order=1
    )
    assert "2 elements" in str(report) and "also compared near these arguments" in str(report)


def test_an_infinite_value_has_no_gradient_and_hides_no_other() -> None:
    x = torch.tensor([1000.0, 1.0])
    check_derivatives(torch.exp, x)
    with pytest.raises(AssertionError, match="reverse mode of order 1 is wrong"):
        check_derivatives(lambda x: WrongCube.apply(x.exp()), x)


class WrongBesideRoot(torch.autograd.Function):
    """Roots and cubes, of which a gradient is wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sqrt(), x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g / (2 * x.sqrt()) + h * 3.001 * x**2

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return t / (2 * x.sqrt()), 3 * x**2 * t


def test_an_infinite_slope_is_left_out_and_hides_no_other() -> None:
    x = torch.tensor([0.0, 1.0, 2.0])
    for fn in (torch.sqrt, lambda x: (x.sqrt(), 2 * x), lambda x: (x**0.5, x.acos())):
        check_derivatives(fn, x / 2)
    with pytest.raises(AssertionError, match="forward mode of order 1 is wrong"):
        check_derivatives(WrongBesideRoot.apply, x)


def test_an_order_that_torch_does_not_have_is_left_out_and_said() -> None:
    for fn, why in ((Once.apply, "once_differentiable"), (F.hardsigmoid, "hardsigmoid_backward")):
        report = check_derivatives(fn, X)
        assert "order 2: not compared: " in str(report) and why in str(report)
    rows = {row.path: row for row in equal(Once.apply, lambda x: x**3, X)}
    assert rows["second gradients"].skipped


def test_gradients_of_some_arguments_alone_are_compared() -> None:
    check_derivatives(torch.mul, X, X + 1)
    with pytest.raises(AssertionError, match=r"wrong if only args\[1\] requires gradients"):
        check_derivatives(ProductInBoth.apply, X, X + 1, directions=6)


@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_each_choice_of_few_arguments_are_compared(count: int) -> None:
    factors = [torch.tensor([1.5, -0.7]) + i for i in range(count)]
    for choice in range(1, 2**count - 1):
        wrong = tuple(choice >> i & 1 == 1 for i in range(count))
        with pytest.raises(AssertionError, match="if only"):
            check_derivatives(lambda *xs, w=wrong: ProductByChoice.apply(w, *xs), *factors)


@pytest.mark.parametrize("order", ["backward", "twice"])
def test_dropout_draws_as_its_reference(order: str) -> None:
    x = torch.arange(1.0, 101.0)
    equal(lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5), x, orders=[order])


def test_lines_of_hypothesis_are_not_the_users() -> None:
    @hypothesis.settings(max_examples=1, derandomize=True, database=None)
    @hypothesis.given(st.integers())
    def run(number: int) -> None:
        lines.append(user_lines.is_user(hypothesis.given.__code__))

    lines: list[bool] = []
    run()
    assert lines == [False]


def test_a_gradient_that_is_nan_where_slopes_are_finite_is_wrong() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    with pytest.raises(AssertionError, match="nan"):
        check_derivatives(lambda x: x.square().sum(-1).sqrt(), x, order=1)
    check_derivatives(torch.sqrt, torch.tensor([0.0, 1.0, 2.0]))
