"""check_derivatives on many functions with random arguments: right ones pass, wrong ones do not."""

from __future__ import annotations

import pytest
import torch
from differentiable import FUNCTIONS, PLANTS, SIZE, drawn, planted
from effort import examples

from torchard.testing import check_derivatives

# Where a kernel of torch has no second derivative.
FIRST_ONLY = {"hardsigmoid"}


def order_of(name: str) -> int:
    return 1 if name in FIRST_ONLY else 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_right_derivatives_pass(name: str) -> None:
    for seed in range(examples(1, 100)):
        check_derivatives(FUNCTIONS[name].fn, *drawn(name, seed), order=order_of(name), seed=seed)


def slopes(name: str, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The sizes of the derivatives of each element of a result, beside the element itself."""
    jacobians = torch.autograd.functional.jacobian(FUNCTIONS[name].fn, args)
    value = FUNCTIONS[name].fn(*args)
    sizes = [j.abs().reshape(value.numel(), -1).sum(1) for j in jacobians]
    return torch.stack(sizes).sum(0)


@pytest.mark.parametrize("where, mode, order", PLANTS)
def test_wrong_derivatives_are_found(where: str, mode: str, order: int) -> None:
    names = [name for name in FUNCTIONS if order <= order_of(name)]
    for name in names[order :: examples(12, 1)]:
        args = drawn(name, 0)
        steep = slopes(name, args)
        wrong = planted(FUNCTIONS[name].fn, where, mode, order, seed=int(steep.argmax()))
        if float(steep.max()) < 1e-3:  # of values of about 1
            continue
        with pytest.raises(AssertionError, match=f"mode of order {order} is wrong"):
            check_derivatives(wrong, *args, order=order)
            pytest.fail(f"{name}: a derivative that is off by {SIZE} passes")
