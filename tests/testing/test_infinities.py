"""Infinities in a program leave the other values comparable: a mistake beside them is found."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from torchard.testing import equal, localize
from torchard.testing import strategies as ts
from torchard.testing.bounds import Expected

Fn = Callable[[torch.Tensor], torch.Tensor]
LATER = torch.ones(4, 4, dtype=torch.bool).triu(1)


def scores(x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    return x @ x.mT * scale


# Right, and with a mistake.
MASKED: dict[str, tuple[Fn, Fn]] = {
    "masked_fill": (
        lambda x: scores(x).masked_fill(LATER, -torch.inf).softmax(-1) @ x,
        lambda x: scores(x, 1.0).masked_fill(LATER, -torch.inf).softmax(-1) @ x,
    ),
    "where": (
        lambda x: torch.where(LATER, -torch.inf, scores(x)).softmax(-1) @ x,
        lambda x: 2 * torch.where(LATER, -torch.inf, scores(x)).softmax(-1) @ x,
    ),
    "a mask shifted by one": (
        lambda x: scores(x).masked_fill(LATER, -torch.inf).softmax(-1) @ x,
        lambda x: scores(x).masked_fill(LATER.triu(2), -torch.inf).softmax(-1) @ x,
    ),
    "an added mask": (
        lambda x: (scores(x) + torch.zeros(4, 4).masked_fill(LATER, -torch.inf)).logsumexp(-1),
        lambda x: (scores(x) + torch.zeros(4, 4).masked_fill(LATER, -torch.inf)).exp().sum(-1),
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
        lambda x: 2 * F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    ),
    "padding of a maximum": (
        lambda x: F.pad(x, (0, 2), value=-torch.inf).amax(-1) + x.sum(-1),
        lambda x: F.pad(x, (0, 2), value=-torch.inf).amax(-1) + x.mean(-1),
    ),
    "a row without values": (
        lambda x: torch.cat([x.softmax(-1), torch.full_like(x, -torch.inf).softmax(-1)]),
        lambda x: torch.cat([7 * x.softmax(-1), torch.full_like(x, -torch.inf).softmax(-1)]),
    ),
    "infinite results": (
        lambda x: torch.cat([x.tanh(), torch.log(x * 0)]),
        lambda x: torch.cat([x.sin(), torch.log(x * 0)]),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_right_and_wrong(name: str, dtype: torch.dtype) -> None:
    right, wrong = MASKED[name]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    orders = ("value",) if name == "infinite results" else ("value", "gradient")
    report = equal(right, right, x, orders=orders)
    assert all(math.isfinite(row.bound) for row in report)
    with pytest.raises(AssertionError, match=r"times its bound|nothing is rounded"):
        equal(wrong, right, x, orders=orders)


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
