"""check_training: losses and steps that train what they should, and those that do not."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torchard import random
from torchard.testing import check_training

X = random.normal(random.key(0), (8, 3))
Y = random.normal(random.key(1), (8, 2))
PARAMS = {
    "first": random.normal(random.key(2), (3, 4)),
    "last": {"w": random.normal(random.key(3), (4, 2)), "b": torch.zeros(2)},
}


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(x @ params["first"])
    return (hidden @ params["last"]["w"] + params["last"]["b"] - y).square().mean()


def step(params: Any, x: torch.Tensor, y: torch.Tensor, rate: float = 0.1) -> Any:
    gradients, value = torch.func.grad_and_value(loss)(params, x, y)
    return torch.utils._pytree.tree_map(lambda p, g: p - rate * g, params, gradients), value


def test_a_loss() -> None:
    check_training(loss, PARAMS, X, Y)
    check_training(
        lambda p, x, y: loss({**p, "first": p["first"].detach()}, x, y),
        PARAMS,
        X,
        Y,
        frozen=["params['first']"],
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda p, x, y: loss({**p, "first": p["first"].detach()}, x, y),
            r"\['first'\] has no gradient",
        ),
        (
            lambda p, x, y: loss(p, x, y) + 0 * p["first"][0, 0].sqrt(),
            r"\['first'\] has a gradient that",
        ),
        (lambda p, x, y: loss(p, x, y) * torch.nan, "the loss is nan"),
        (lambda p, x, y: 2 * loss(p, x, y).detach() - loss(p, x, y), "no small step against"),
        (lambda p, x, y: loss(p, x, y).detach(), r"\['last'\]\['b'\] has no gradient"),
    ],
)
def test_losses_that_do_not_train(wrong: Any, message: str) -> None:
    params = {**PARAMS, "first": PARAMS["first"].clone()}
    params["first"][0, 0] = 0  # where the derivative of a square root is infinite
    with pytest.raises(AssertionError, match=message):
        check_training(wrong, params, X, Y)


def test_a_step() -> None:
    check_training(step, PARAMS, X, Y)

    def counted(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        new, value = step(params["net"], x, y)
        return {"net": new, "steps": params["steps"] + 1}, value

    state = {"net": PARAMS, "steps": torch.tensor(0)}
    check_training(counted, state, X, Y, buffers=["*steps*"])
    with pytest.raises(AssertionError, match=r"params\['steps'\] changes, and should not"):
        check_training(counted, state, X, Y)
    with pytest.raises(AssertionError, match=r"params\['net'\]\['first'\] changes, and should not"):
        check_training(counted, state, X, Y, buffers=["*steps*"], frozen=["*first*"])
    with pytest.raises(AssertionError, match=r"params\['first'\] does not change"):
        check_training(
            lambda p, x, y: ({**step(p, x, y)[0], "first": p["first"]}, loss(p, x, y)), PARAMS, X, Y
        )
    with pytest.raises(AssertionError, match="the loss goes from"):
        check_training(lambda p, x, y: step(p, x, y, rate=-0.1), PARAMS, X, Y)
    check_training(lambda p, x, y: step(p, x, y, rate=-0.1), PARAMS, X, Y, descends=False)
    with pytest.raises(AssertionError, match="is not finite"):
        check_training(lambda p, x, y: step(p, x, y, rate=torch.inf), PARAMS, X, Y)


def module_step(module: Any, x: torch.Tensor, y: torch.Tensor, only: Any = None) -> torch.Tensor:
    module.zero_grad()
    value = F.mse_loss(module(x), y)
    value.backward()
    torch.optim.SGD(only or [p for p in module.parameters() if p.requires_grad], 0.1).step()
    return value


def test_a_step_of_a_module() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    with pytest.raises(AssertionError, match="changes, and should not"):
        check_training(module_step, module, X, Y, frozen=["2.bias"])
    module[0].bias.requires_grad_(False)
    check_training(module_step, module, X, Y, buffers=["1.*running*", "1.num_batches_tracked"])
    for given in ({"buffers": ["1.num*"]}, {"buffers": []}, {"frozen": ["1.running_mean"]}):
        with pytest.raises(AssertionError, match=r"1\.running_mean changes, and should not"):
            check_training(module_step, module, X, Y, **given)
    module[1].eval()
    check_training(module_step, module, X, Y)
    with pytest.raises(AssertionError, match=r"2\.weight does not change"):
        check_training(lambda *a: module_step(*a, only=module[:2].parameters()), module, X, Y)


def test_calls_that_are_wrong() -> None:
    with pytest.raises(ValueError, match="frozen has 'first', which names no leaf"):
        check_training(loss, PARAMS, X, Y, frozen=["first"])
    with pytest.raises(ValueError, match="nothing to train"):
        check_training(loss, PARAMS, X, Y, frozen=["*"])
    with pytest.raises(TypeError, match=r"It returned a torch.float32 of shape \[8, 2\]"):
        check_training(lambda p, x, y: y, PARAMS, X, Y)


def test_gradients_that_are_not_cleared() -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)

    def forgetful(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = F.mse_loss(module(x), y)
        value.backward()
        torch.optim.SGD(module.parameters(), 0.1).step()
        return value

    def in_two(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for part in range(2):
            (F.mse_loss(module(x[part::2]), y[part::2]) / 2).backward()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            value = F.mse_loss(module(x), y)
        optimizer.zero_grad(set_to_none=False)
        return value

    for descends in (True, False):
        module.zero_grad()
        with pytest.raises(AssertionError, match=r"bias has the previous step's gradient added"):
            check_training(forgetful, module, X, Y, descends=descends)
    module.zero_grad()
    check_training(in_two, module, X, Y)


def test_a_loss_that_goes_down_by_itself() -> None:
    calls: list[int] = []

    def counting(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        calls.append(1)
        return step(params, x, y)[0], torch.tensor(1.0 / len(calls))

    with pytest.raises(
        AssertionError, match=r"goes from 1 to 0\.5 .* it depends on something that is not in"
    ):
        check_training(counting, PARAMS, X, Y)


def test_dropout_is_the_same_in_each_call() -> None:
    def dropped(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(torch.tanh(x @ params["first"]), 0.5)
        return (hidden @ params["last"]["w"] + params["last"]["b"] - y).square().mean()

    def small_step(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        gradients, value = torch.func.grad_and_value(dropped, argnums=0)(params, x, y)
        return torch.utils._pytree.tree_map(lambda p, g: p - 1e-4 * g, params, gradients), value

    for seed in range(5):
        torch.manual_seed(seed)
        check_training(lambda p, x, y: small_step(p, x, y), PARAMS, X, Y)


def test_a_bias_before_batch_norm() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    with torch.no_grad():
        module[0].bias.add_(100)  # beside which the noise of its gradient is rounded off
    buffers = ["1.*running*", "1.num*"]
    with pytest.raises(AssertionError, match=r"0\.bias does not change .*name it in optional="):
        check_training(module_step, module, X, Y, buffers=buffers)
    check_training(module_step, module, X, Y, buffers=buffers, optional=["0.bias"])
    with pytest.raises(ValueError, match="optional has 'bias', which names no leaf"):
        check_training(module_step, module, X, Y, optional=["bias"])
    unused = {**PARAMS, "unused": torch.ones(2)}
    check_training(loss, unused, X, Y, optional=["*unused*"])


def test_a_loss_of_a_module_is_no_step() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with pytest.raises(TypeError, match=r"this is a loss of a module.*functional_call"):
        check_training(lambda m, x, y: F.mse_loss(m(x), y), module, X, Y)

    module.append(torch.nn.BatchNorm1d(2))  # whose buffers a loss changes, too
    with pytest.raises(TypeError, match=r"this is a loss of a module.*functional_call"):
        check_training(lambda m, x, y: F.mse_loss(m(x), y), module, X, Y)


@pytest.mark.parametrize("cleared", [False, True])
def test_gradients_without_a_step(cleared: bool) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def of_no_effect(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = F.mse_loss(module(x), y)
        value.backward()
        if cleared:
            optimizer.zero_grad()
            optimizer.step()
        return value

    with pytest.raises(
        AssertionError, match=r"should:\n  backward.* cleared \(zero_grad\) before optimizer"
    ):
        check_training(of_no_effect, module, X, Y)


def test_buffers_of_a_module_may_change() -> None:
    class Counted(torch.nn.Sequential):
        seen: torch.Tensor | None

        def __init__(self) -> None:
            super().__init__(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
            self.register_buffer("seen", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x if self.seen is None else torch.cat([self.seen, x])
            result: torch.Tensor = super().forward(x)
            return result

    torch.manual_seed(0)
    check_training(module_step, Counted(), X, Y, optional=["0.bias"])
    module = Counted()
    module(X)  # after which what is seen has another shape with each step
    check_training(module_step, module, X, Y, optional=["0.bias"])
    with pytest.raises(AssertionError, match=r"seen was torch\.float32 of"):
        check_training(module_step, module, X, Y, optional=["0.bias"], buffers=["1.*running*"])


@pytest.mark.parametrize("forgets", [False, True])
def test_gradients_of_frozen_parameters_may_add_up(forgets: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(module[2].parameters(), 0.1)

    def of_the_head(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not forgets:
            optimizer.zero_grad()
        value = F.mse_loss(module(x), y)
        value.backward()
        optimizer.step()
        return value

    with (
        pytest.raises(AssertionError, match=r"2\.bias has") if forgets else contextlib.nullcontext()
    ):
        check_training(of_the_head, module, X, Y, frozen=("0.weight", "0.bias"))


def test_a_step_with_an_attached_loss_of_leaves_that_require_gradients() -> None:
    params = torch.utils._pytree.tree_map(lambda p: p.clone().requires_grad_(), PARAMS)

    def attached(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        leaves, spec = torch.utils._pytree.tree_flatten(params)
        value = loss(params, x, y)
        gradients = torch.autograd.grad(value, leaves, retain_graph=True)
        new = [
            (p - 0.1 * g).detach().requires_grad_() for p, g in zip(leaves, gradients, strict=True)
        ]
        return torch.utils._pytree.tree_unflatten(new, spec), value

    check_training(attached, params, X, Y)


def test_what_is_trained_is_told() -> None:
    found = check_training(step, PARAMS, X, Y)
    assert (found.count, str(found).split(",")[0]) == (
        3,
        "3 leaves trained by a step: params['first']",
    )
    module = torch.nn.Linear(3, 2)
    module.bias.requires_grad_(False)
    assert str(check_training(module_step, module, X, Y)) == (
        "1 leaf trained by a step: weight; 1 not trained"
    )
