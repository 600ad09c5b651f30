"""check_derivatives on drawn inputs: no alarm on torch's functions, and one in 100,000 is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import examples
from torch.nn import functional as F
from untraceable import OldStyle

from torchard.testing import check_derivatives

Fn = Callable[..., torch.Tensor]
TARGET = torch.tensor([1, 0, 3, 2])
FUNCTIONS: dict[str, Fn] = {
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "softplus": F.softplus,
    "glu": F.glu,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,), None, 1e-6),
    "normalize": F.normalize,
    "cross_entropy": lambda x: F.cross_entropy(x, TARGET),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "relu": F.relu,
    "huber": lambda x: F.huber_loss(x, x.new_zeros(x.shape), delta=1.0),
    "max": lambda x: x.amax(-1),
    "clamp": lambda x: x.clamp(-1, 1),
    "slogdet": lambda x: torch.linalg.slogdet(x + 4 * torch.eye(4, dtype=x.dtype))[1],
    "determinant": torch.linalg.det,
    "old-style Function": OldStyle.apply,
    "masked": lambda x: x[x > 0].square().sum() + x.mean(),
    "dropout": lambda x: F.dropout(x, 0.3).sin(),
}


def drawn(seed: int) -> torch.Tensor:
    """Values of all sizes; small whole numbers, with ties, every third time."""
    generator = torch.Generator().manual_seed(seed)
    if seed % 3 == 0:
        return torch.randint(-2, 3, (4, 4), generator=generator).double()
    x = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    return x * 10.0 ** torch.randint(-2, 3, (), generator=generator)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_right_function_is_right_wherever_it_is_evaluated(name: str) -> None:
    for seed in range(examples(5, 300)):
        check_derivatives(FUNCTIONS[name], drawn(seed), seed=seed)


class _Off(torch.autograd.Function):
    """The identity, with a gradient that is one in 100,000 too large."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + 1e-5)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent * 1


class _InHalf(_Off):
    """The identity, whose gradient is rounded to half precision."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.half().to(gradient.dtype)


def _off_in_both(y: torch.Tensor) -> torch.Tensor:
    return y + 1e-5 * (y - y.detach())


def _off_in_one(y: torch.Tensor) -> torch.Tensor:
    last = (torch.arange(y.numel()) == y.numel() - 1).view(y.shape)
    return y + 1e-5 * (y - y.detach()) * last


WRONG: dict[str, Fn] = {
    "reverse": _Off.apply,
    "half": _InHalf.apply,
    "both": _off_in_both,
    "one": _off_in_one,
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"dropout", "clamp", "max"}))
def test_one_in_a_hundred_thousand_is_found(name: str, wrong: str) -> None:
    for seed in range(1, examples(2, 50)):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x[-1, -1] = 0.5  # where no derivative is zero
        with pytest.raises(AssertionError, match="mode of order 1 is wrong"):
            check_derivatives(lambda x: WRONG[wrong](FUNCTIONS[name](x)), x, order=1)


def test_several_kinks_at_once() -> None:
    """A derivative that is taken from between the sides of each is right, whatever the signs."""
    x = torch.tensor([1.0, -1.0, 1.0, 3.0], dtype=torch.float64)
    for seed in range(examples(20, 500)):
        check_derivatives(lambda x: F.huber_loss(x, torch.zeros_like(x)), x, seed=seed)


def test_what_is_below_the_rounding_of_a_kernel_is_not_compared() -> None:
    """Kernels that cancel inside: their noise is seen in what they return."""
    x = torch.tensor([[9.3, -9.9, 27.5, 0.72]], dtype=torch.float64)
    check_derivatives(lambda x: x.log_softmax(-1), x)
    check_derivatives(F.glu, torch.tensor([[-74.6, 25.2]], dtype=torch.float64))


def test_steps_reach_what_is_small() -> None:
    check_derivatives(lambda x: x / (x.abs() + 1e-5), torch.zeros(1), order=1)
    with pytest.raises(AssertionError, match="is wrong"):
        check_derivatives(
            lambda x: _off_in_both(x / (x.abs() + math.exp(-9))), torch.full((1,), 1e-4), order=1
        )
