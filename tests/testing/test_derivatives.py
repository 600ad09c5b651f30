"""check_derivatives: no right function fails by chance, and no wrong derivative passes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from effort import examples
from torch.nn import functional as F

from torchard import nn, random
from torchard.testing import check_derivatives

X = random.normal(random.key(0), (4, 5), dtype=torch.float64)
W1 = random.normal(random.key(1), (5, 7), dtype=torch.float64)
W2 = random.normal(random.key(2), (7, 3), dtype=torch.float64)

Fn = Callable[..., torch.Tensor]
SMOOTH: dict[str, Fn] = {
    "gelu": lambda x, w1, w2: F.gelu(x @ w1) @ w2,
    "softmax": lambda x, w1, w2: (x @ w1).softmax(-1) @ w2,
    "logsumexp": lambda x, w1, w2: (x @ w1 @ w2).logsumexp(-1),
    "layer_norm": lambda x, w1, w2: nn.layer_norm(x @ w1) @ w2,
    "cubes": lambda x, w1, w2: (x**3 - x) @ w1 @ w2**3,
    "waves": lambda x, w1, w2: (8 * x @ w1).sin() @ w2.tanh(),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_no_right_function_fails_by_chance(name: str) -> None:
    for seed in range(examples(12, 200)):
        check_derivatives(SMOOTH[name], X, W1, W2, directions=1, seed=seed)


def scaled(y: torch.Tensor) -> torch.Tensor:
    """y, with a derivative that is 1.001 times y's."""
    return y + 1e-3 * (y - y.detach())


def scaled_twice(y: torch.Tensor) -> torch.Tensor:
    """y, with its derivative and a second derivative off by a thousandth of the first's square."""
    return y + 1e-3 * (y - y.detach()) ** 2


def one_element(y: torch.Tensor) -> torch.Tensor:
    """y, with a derivative that is 1.001 times y's in the last element."""
    return y + 1e-3 * (y - y.detach()) * (torch.arange(y.numel()) == y.numel() - 1).view(y.shape)


def one_term(y: torch.Tensor) -> torch.Tensor:
    """y times tanh(y), of whose derivative the term with tanh's is missing."""
    return y * torch.tanh(y).detach()


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("wrong", [scaled, one_element, one_term])
def test_what_is_a_thousandth_or_a_term_off_is_found(name: str, wrong: Fn) -> None:
    for seed in range(examples(3, 50)):
        with pytest.raises(AssertionError, match="mode of order 1 is wrong"):
            check_derivatives(lambda *args: wrong(SMOOTH[name](*args)), X, W1, W2, order=1, seed=seed)


@pytest.mark.parametrize("name", SMOOTH)
def test_a_second_derivative_that_is_off_is_found(name: str) -> None:
    for seed in range(examples(3, 50)):
        with pytest.raises(AssertionError, match="mode of order 2 is wrong"):
            check_derivatives(lambda *args: scaled_twice(SMOOTH[name](*args)), X, W1, W2, seed=seed)


@pytest.mark.parametrize("modes", [["forward", "reverse"], ["reverse"]])
def test_the_message_says_how_far_off_and_how_far_it_may_be(modes: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        check_derivatives(lambda x: scaled(x.sin()).sum(), X, order=1, modes=modes)
    found = re.search(r"they are (\S+) apart, (\S+) times the bound of (\S+)$", str(caught.value))
    assert found
    apart, times, bound = map(float, found.groups())
    assert times > 1
    assert apart / bound == pytest.approx(times, rel=0.1)
