"""torch.utils.checkpoint in a functionalized module, outside of a trace: computed twice alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchard as ta
from torchard import PurityError

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.linear(x))).sin()


# How a forward has a block computed again.
CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "module": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "function": lambda block, x: checkpoint(lambda x: block(x).cos(), x, use_reentrant=False),
    "parameter": lambda block, x: checkpoint(torch.mul, block.linear.bias, x, use_reentrant=False),
    "nested": lambda block, x: checkpoint(
        lambda x: checkpoint(block, x, use_reentrant=False).cos(), x, use_reentrant=False
    ),
}


class Model(nn.Module):
    def __init__(self, call: str, recompute: bool, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(dropout), Block(dropout)])
        self.call, self.recompute = call, recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = CALLS[self.call](block, x) if self.recompute else block(x)
        return x


def run(model: Model, key: Tensor | None = None) -> Any:
    """The result, buffers and gradients of a call."""
    fn, params = ta.functionalize(model)
    params = {k: p.clone().requires_grad_() for k, p in params.items()}
    x = X.clone().requires_grad_()
    out, buffers = fn(params, x, key=key, buffers=fn.buffers)
    before = {k: b.clone() for k, b in buffers.items()}
    out.square().sum().backward()
    torch.testing.assert_close(buffers, before)
    return out, buffers, {k: p.grad for k, p in params.items()}, x.grad


@pytest.mark.parametrize("call", CALLS)
def test_gradients_are_the_modules(call: str) -> None:
    model = Model(call, recompute=True).eval()
    out, _, gradients, of_x = run(model)
    x = X.clone().requires_grad_()
    expected = model(x)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gradients, {k: p.grad for k, p in model.named_parameters()})
    torch.testing.assert_close(of_x, x.grad)


@pytest.mark.parametrize("call", ["module", "reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_masks_and_buffers_are_those_of_one_call(call: str, dropout: float) -> None:
    key = ta.random.key(1)
    once = run(Model(call, recompute=False, dropout=dropout), key)
    torch.testing.assert_close(run(Model(call, recompute=True, dropout=dropout), key), once)


def test_stacked_layers_are_refused() -> None:
    fn, params = ta.functionalize(Model("module", recompute=True).eval(), stacked="layers")
    params = {k: p.clone().requires_grad_() for k, p in params.items()}
    with pytest.raises(PurityError, match=r"test_module_recomputed\.py:\d+.*torchard\.checkpoint"):
        fn(params, X)
