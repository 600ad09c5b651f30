"""Depth without rewriting a model: what stacked layers do and recognised ones do not, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from torchard import LoopError, functionalize, optim, trace
from torchard.functional.loops import equal_layers as limits
from torchard.functional.loops.recognised import recognised
from torchard.functional.programs.program import Program
from torchard.functional.programs.unrolled import has_loops

WIDTH = 4
X = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


@pytest.fixture(autouse=True)
def few_operations_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs are rolled, too."""
    monkeypatch.setattr(limits, "MIN_SAVED_PER_LOOP", 1)
    monkeypatch.setattr(limits, "MIN_SAVED", 1)


class Deep(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module], depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(layer, range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def equal(_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def by_turns(i: int) -> nn.Module:
    """Every second layer is wider inside, without a bias, and has another activation."""
    wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    return wide if i % 2 else equal(i)


def training(fn: Any, params: Any) -> Program:
    """A step of AdamW."""
    optimizer = optim.adamw(1e-2)

    def step(params: Any, state: Any, x: Tensor) -> Any:
        grads, value = grad_and_value(fn)(params, x)
        return *optimizer.update(grads, state, params), value

    return trace(step)(params, optimizer.init(params), X)


def computes(program: Program) -> int:
    """How many operations there are, without those that list rows or take them."""
    markers = ("item", "listed", "rows", "row")
    return sum(getattr(node.target, "__name__", "") not in markers for node in program.calls)


def test_only_stacked_layers_are_traced_once() -> None:
    """The traced step and its arguments are the same size at any depth; others are rolled afterwards."""
    traced: dict[bool, list[int]] = {True: [], False: []}
    inputs: dict[bool, list[int]] = {True: [], False: []}
    rolled = []
    for depth in (8, 16):
        module = Deep(equal, depth)
        for stacked in (True, False):
            program = training(*functionalize(module, **({"stacked": "layers"} if stacked else {})))
            traced[stacked].append(computes(program))
            inputs[stacked].append(len(program.inputs))
        rolled.append(computes(recognised(program)))
    assert traced[True][0] == traced[True][1] and inputs[True][0] == inputs[True][1]
    assert traced[False][1] > 1.8 * traced[False][0] and inputs[False][1] > 1.8 * inputs[False][0]
    assert rolled[0] == rolled[1] < traced[False][0]


def test_only_recognised_layers_may_take_turns() -> None:
    """And need no module: any Python that comes to equal operations, the optimizer's included."""
    with pytest.raises(LoopError, match=r"layers\.1 has "):
        functionalize(Deep(by_turns, 8), stacked="layers")

    def without_modules(params: list[list[Tensor]], x: Tensor) -> Tensor:
        for i, (a, b) in enumerate(params):
            x = x + (torch.tanh(x @ a) @ b if i % 2 else torch.sigmoid(x @ a) @ b)
        return x.square().sum()

    modules, lists = [], []
    for depth in (8, 16):
        modules.append(recognised(training(*functionalize(Deep(by_turns, depth)))))
        params = [[torch.eye(WIDTH) / (i + 1), torch.eye(WIDTH)] for i in range(depth)]
        lists.append(recognised(training(without_modules, params)))
    for one, two in (modules, lists):
        assert has_loops(one) and has_loops(two)
        assert computes(one) == computes(two)
