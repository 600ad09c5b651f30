"""The methods of `nn.Module` by which a forward reads its tensors, in a functionalized module."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchard as ta


def norms(tensors: Any) -> Tensor:
    return torch.stack([t.square().sum() for t in tensors]).sum()


def by_a_level(m: Any, number: int) -> Tensor:
    return torch.func.grad(lambda x: x * m.layers[number].weight.sum())(m.own)


def by_a_checkpoint(m: Any, number: int) -> Tensor:
    return ta.checkpoint(lambda x: x * m.layers[number].weight.sum())(m.own)


READINGS: dict[str, Callable[[nn.Module], Tensor]] = {
    "get_parameter": lambda m: m.get_parameter("layers.1.weight").sum(),
    "get_parameter of a layer": lambda m: m.layers[0].get_parameter("weight").sum(),
    "get_buffer": lambda m: m.get_buffer("layers.1.scale").sum() + m.get_buffer("shift"),
    "get_submodule": lambda m: m.get_submodule("layers.1").weight.sum(),
    "parameters": lambda m: norms(m.parameters()),
    "parameters of its own": lambda m: norms(m.parameters(recurse=False)),
    "named_parameters": lambda m: norms([p for k, p in m.named_parameters() if "weight" in k]),
    "named_parameters with duplicates": lambda m: norms(
        [p for _, p in m.named_parameters(remove_duplicate=False)]
    ),
    "buffers": lambda m: norms(m.buffers()),
    "named_buffers": lambda m: norms([b for _, b in m.named_buffers()]),
    "state_dict": lambda m: norms(m.state_dict().values()) + norms(m.state_dict(keep_vars=True).values()),
    "named_modules": lambda m: norms(
        [p for _, part in m.named_modules() for p in part.parameters(False)]
    ),
    "children": lambda m: norms([p for part in m.layers.children() for p in part.parameters()]),
    "getattr": lambda m: getattr(m.layers[1], "weight").sum(),  # noqa: B009
    "is a parameter": lambda m: norms(
        [v for v in (m.own, m.shift, m.layers[1].weight) if isinstance(v, nn.Parameter)]
    ),
    "hasattr": lambda m: m.own * hasattr(m.layers[1], "weight"),
    "its table": lambda m: norms(m._parameters.values()) + m.layers[1]._parameters["weight"].sum(),
    "vector": lambda m: torch.nn.utils.parameters_to_vector(m.parameters()).square().sum(),
    "that require gradients": lambda m: norms([p for p in m.parameters() if p.requires_grad]),
    "the same object": lambda m: m.own * (m.layers[1].weight is m.layers[1].weight),
    "the same by a method": lambda m: m.own * (m.layers[1].weight is m.get_parameter("layers.1.weight")),
    "others": lambda m: m.own * (m.layers[0].weight is not m.layers[1].weight),
    "in the parameters": lambda m: m.own * any(p is m.layers[1].weight for p in m.parameters()),
    "each once": lambda m: m.own * len({id(p) for _ in range(2) for p in m.parameters()}),
    "by a key": lambda m: m.own * {p: i for i, p in enumerate(m.parameters())}[m.layers[1].weight],
    "of a level": lambda m: m.own * torch.func.grad(
        lambda x: x * m.layers[1].weight.sum() * (m.layers[1].weight is m.layers[1].weight)
    )(m.own) + m.layers[1].weight.sum(),
    "of two levels": lambda m: m.own * sum(map(functools.partial(by_a_level, m), (1, 1, 0))),
    "in a checkpoint": lambda m: (
        sum(map(functools.partial(by_a_checkpoint, m), (1, 1, 0))) + m.layers[1].weight.sum()
    ),
    "deep copies": lambda m: m.own * copy.deepcopy(m.layers[1]).weight.detach().sum(),
    "a deep copy of a parameter": lambda m: m.own * copy.deepcopy(m.layers[1].weight).detach().sum(),
    "a deep copy of the layers": lambda m: m.own * norms(copy.deepcopy(m.layers).parameters()).detach(),
    "numbers": lambda m: m.own * sum(p.numel() for p in m.parameters() if p.ndim == 2),
}


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh() * self.get_buffer("scale") + self.get_parameter("weight").sum()


class Model(nn.Module):
    def __init__(self, read: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.own = nn.Parameter(torch.tensor(0.5))
        self.tied = self.own
        self.register_buffer("shift", torch.tensor(0.25))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.read(self) + self.shift


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "plainly"])
@pytest.mark.parametrize("stacked", [(), "layers"], ids=["as it is", "stacked"])
@pytest.mark.parametrize("reading", READINGS)
def test_a_forward_reads_what_the_module_would(reading: str, stacked: Any, traced: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(READINGS[reading]), torch.linspace(-1, 1, 6).reshape(2, 3)
    fn, params = ta.functionalize(model, stacked=stacked)
    run = ta.jit(fn, backend="eager") if traced else fn
    expected = model(x)
    expected.square().sum().backward()
    params = {k: p.clone().requires_grad_() for k, p in params.items()}
    result = run(params, x)
    torch.testing.assert_close(result, expected)
    found = torch.autograd.grad(result.square().sum(), list(params.values()), materialize_grads=True)
    gradients = {k: p.grad for k, p in model.named_parameters()}
    zeros = {k: torch.zeros(p.shape) for k, p in model.named_parameters()}
    wanted = fn.stack({k: zeros[k] if p is None else p for k, p in gradients.items()})
    torch.testing.assert_close(dict(zip(params, found, strict=True)), wanted)
    assert not any(isinstance(p, nn.Parameter) for p in params.values())
