"""Functions close over the variables of a Python loop, which change before derivatives are traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchard import jit, repeat
from torchard.functional.guards.present_cells import with_present_cells

X, WS = torch.arange(1.0, 5.0).double(), torch.arange(1.0, 9.0).double().reshape(2, 4)


def stopped(x: Tensor, ws: Tensor) -> Tensor:
    """A factor without a gradient in each block, so that derivatives run the block again."""
    total = x.sum()
    for power in (1, 2, 3):

        def block(w: Tensor, x: Tensor) -> Tensor:
            with torch.no_grad():
                factor = x.mean() % 3
            return factor * x + w**power  # noqa: B023

        total = total + repeat(block, ws, x).sum()
    return total


def nested(x: Tensor, ws: Tensor) -> Tensor:
    """Loops in loops, with constants, by functions that close over each other."""

    def run(steps: list[str], x: Tensor, ws: Tensor) -> Tensor:
        total = x
        for step in steps:

            def block(w: Tensor, x: Tensor) -> Tensor:
                if step == "inner":  # noqa: B023
                    return run(["scale"], x, torch.stack([w, x]))
                return x * torch.tensor([1, 2, 3, 4]) if step == "scale" else x + w  # noqa: B023

            total = total + repeat(block, ws, x)
        return total

    return run(["inner", "add"], x, ws).sum()


@pytest.mark.parametrize("fn", [stopped, nested])
def test_gradients(fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    want = torch.func.grad(fn, (0, 1))(X, WS)
    for have in (
        torch.func.grad(jit(fn, backend="eager"), (0, 1))(X, WS),
        jit(torch.func.grad(fn, (0, 1)), backend="eager")(X, WS),
    ):
        assert all(map(torch.equal, have, want))


def test_later_derivatives() -> None:
    """Second and third derivatives of functions that were made in a loop."""

    def derivatives(transform: Callable[..., Any]) -> list[Tensor]:
        x = X.clone().requires_grad_()
        total = torch.zeros(())
        for power in (2, 3, 4):

            def fn(x: Tensor) -> Tensor:
                with torch.no_grad():
                    factor = x.mean()
                return (factor * x**power).sum()  # noqa: B023

            total = total + transform(fn)(x)
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return [first, second, *torch.autograd.grad(second.sum(), x)]

    have, want = derivatives(lambda fn: jit(fn, backend="eager")), derivatives(lambda fn: fn)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=0)


def test_present_cells() -> None:
    number = 1

    def even(n: int) -> int:
        return number if n == 0 else odd(n - 1)

    def odd(n: int, *, base: int = 10) -> int:
        return base + number if n == 0 else even(n - 1)

    held = with_present_cells(even)
    number = 2
    assert [held(0), held(1), held(2)] == [1, 11, 1]
    assert [even(0), even(1)] == [2, 12]
    assert with_present_cells(len) is len
