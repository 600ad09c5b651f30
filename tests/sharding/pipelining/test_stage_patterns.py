"""One pattern for stages takes the outermost scopes that it matches, as checkpoint's does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from torchard import Mesh, full, functionalize, pipeline, scope

F64 = torch.float64
NUMBER = re.compile(r"^layers\.(\d+)")
PP = Mesh({"pp": 2}, virtual=True)
# How wide the inside of each layer is: where stages are balanced is not always between two layers.
WIDTHS = [(8, 8), (64, 8), (8, 8, 64), (8, 64, 8, 8), (64, 8, 8, 8, 8), (8, 8, 8, 8, 64)]


class Part(nn.Module):
    """A submodule with submodules."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, inside), nn.Linear(inside, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    """A residual layer, so that the layer's own operations come before and after its parts'."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(8), Part(8), Part(inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.one(self.norm(x))
        return x + self.two(x * 2)


class Net(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def of_modules(widths: tuple[int, ...]) -> tuple[Any, Any]:
    return functionalize(Net(widths).to(F64))


def of_scopes(widths: tuple[int, ...]) -> tuple[Any, Any]:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for i, (up, down) in enumerate(params):
            with scope(f"layers.{i}"):
                with scope("up"):
                    inner = torch.tanh(x @ up)
                with scope("layers.down"):
                    inner = inner @ down
                x = x + inner
        return x.square().mean()

    return loss, [(torch.randn(8, n, dtype=F64) / 4, torch.randn(n, 8, dtype=F64)) for n in widths]


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("made", [of_modules, of_scopes])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_layers_are_not_cut(made: Any, widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    fn, params = made(widths)
    x = torch.randn(4, 8, dtype=F64)
    derived = torch.func.grad(fn)
    step = pipeline(derived, PP, "pp", stages="layers.*", microbatches=2, batch=(None, 0))
    torch.testing.assert_close(full(step(params, x)), derived(params, x))
    reports = step.lower(params, x).schedule.stages
    layers = [{number for path in one.scopes for number in NUMBER.findall(path)} for one in reports]
    assert not layers[0] & layers[1]
    assert layers[0] | layers[1] == {str(i) for i in range(len(widths))}
