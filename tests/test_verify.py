"""verify: it passes what is right, and says where something is not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from dummies import Split, halves

from torchard.functional.testing import verify
from torchard.functional.transform import Transformed


def f(p: dict[str, torch.Tensor], x: torch.Tensor, n: int = 2) -> dict[str, Any]:
    h = (x @ p["w"]).tanh() * n
    return {"h": h, "top": h.argmax(-1), "n": n}


P = {"w": torch.randn(4, 4)}
X = torch.randn(2, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_function_verifies_against_itself(dtype: torch.dtype) -> None:
    report = verify(f, f, {"w": P["w"].to(dtype)}, X.to(dtype))
    assert [row.path for row in report] == [
        "out['h']", "out['top']", "gradient of args[0]['w']", "gradient of args[1]",
    ]  # fmt: skip
    assert len(verify(f, f, P, X, grads=False)) == 2


def test_placed_values_are_compared_whole() -> None:
    p = {"w": halves(P["w"])}
    report = verify(Transformed(f, [Split()]), f, p, X)
    assert "gradient of args[0]['w']" in [row.path for row in report]


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.001


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda p, x: {**f(p, x), "h": f(p, x)["h"] * 1.001}, "out['h']"),
        (lambda p, x: f({"w": Wrong.apply(p["w"])}, x), "gradient of args[0]['w']"),
        (lambda p, x: {**f(p, x), "top": f(p, x)["top"] + 1}, "out['top']"),
        (lambda p, x: {**f(p, x), "h": f(p, x)["h"].double()}, "dtype"),
        (lambda p, x: {**f(p, x), "h": f(p, x)["h"][:1]}, "shape [1, 4], reference [2, 4]"),
        (lambda p, x: {**f(p, x), "h": f(p, x)["h"] / 0}, "out['h']"),
        (lambda p, x: {"top": f(p, x)["top"]}, "fn has no such value"),
    ],
)
def test_what_differs_is_named(wrong: Any, where: str) -> None:
    with pytest.raises(AssertionError) as error:
        verify(wrong, f, P, X)
    bad = [line for line in str(error.value).splitlines() if "<--" in line]
    assert any(where in line for line in bad)


def test_closer_than_eager_is_good_enough() -> None:
    """The tolerance is no judge of two orders of a sum; float64 is."""
    x = torch.rand(400, generator=torch.Generator().manual_seed(1))

    def naive(x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, x.unbind())

    def careful(x: torch.Tensor) -> torch.Tensor:
        return x.double().sum().float()

    (row,) = verify(careful, naive, x, grads=False, tolerance=0.0)
    assert row.error > 0 and row.eager > row.error
    with pytest.raises(AssertionError):
        verify(naive, careful, x, grads=False, tolerance=0.0)
