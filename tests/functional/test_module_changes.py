"""A functionalized module that is changed after its first call computes what the changed module does.

Stacked layers may be refused instead, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchard as ta
from torchard import LoopError, PurityError


@dataclass
class Config:
    gain: float = 1.0
    flag: bool = False
    inner: dict[str, float] = field(default_factory=lambda: {"k": 1.0})


CONFIG = Config()
STATE = {"scale": 2.0}


class Layer(nn.Module):
    shared = 1.0

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh()
        self.scale, self.flag, self.numbers, self.config = 1.0, False, [1.0, 2.0], config
        self.function = torch.sin

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(self.norm(x))) * self.scale * self.config.gain * self.shared
        y = self.function(y + self.numbers[0]) * STATE["scale"] * self.config.inner["k"]
        y = y + 5 if self.flag or self.config.flag else y
        return y * 1.5 if self.training else y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = Config()
        self.layers = nn.ModuleList([Layer(config) for _ in range(3)])
        self.after, self.count = 1.0, 3

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.count]:
            x = layer(x)
        return x * self.after


def tripled(module: Any, *args: Any) -> Any:
    return args[-1] * 3


def at(change: Callable[[Any], Any]) -> dict[str, Callable[[Any], Any]]:
    """A change to the first layer, to another one, and to all."""
    return {
        "first": lambda m: change(m.layers[0]),
        "second": lambda m: change(m.layers[1]),
        "all": lambda m: [change(layer) for layer in m.layers],
    }


OF_LAYERS: dict[str, Callable[[Any], Any]] = {
    "number": lambda layer: setattr(layer, "scale", 3.0),
    "flag": lambda layer: setattr(layer, "flag", True),
    "list": lambda layer: setattr(layer, "numbers", [3.0]),
    "item": lambda layer: layer.numbers.__setitem__(0, 3.0),
    "function": lambda layer: setattr(layer, "function", torch.cos),
    "forward": lambda layer: setattr(layer, "forward", lambda x: 7 * x),
    "forward of a part": lambda layer: setattr(layer.act, "forward", lambda x: 7 * x),
    "part": lambda layer: setattr(layer, "act", nn.ReLU()),
    "part's number": lambda layer: setattr(layer.norm, "eps", 1.0),
    "mode": lambda layer: layer.eval(),
    "hides its class's": lambda layer: setattr(layer, "shared", 3.0),
    "hook": lambda layer: layer.register_forward_hook(tripled),
    "hook of a part": lambda layer: layer.act.register_forward_pre_hook(
        lambda module, args: (args[0] * 3,)
    ),
    "config": lambda layer: setattr(layer, "config", Config(gain=3.0)),
    "config's number": lambda layer: setattr(layer.config, "gain", 3.0),
    "config's item": lambda layer: layer.config.inner.__setitem__("k", 3.0),
}
CHANGES = {f"{name}, {where}": fn for name, one in OF_LAYERS.items() for where, fn in at(one).items()} | {
    "of the model": lambda m: setattr(m, "after", 4.0),
    "fewer layers": lambda m: setattr(m, "count", 2),
    "hook of the model": lambda m: m.register_forward_hook(tripled),
    "mode of the model": lambda m: m.eval(),
    "class": lambda m: setattr(Layer, "shared", 3.0),
    "forward of the class": lambda m: setattr(Layer, "forward", lambda self, x: 7 * x),
    "forward of a part's class": lambda m: setattr(nn.Tanh, "forward", lambda self, x: 7 * x),
    "global": lambda m: STATE.update(scale=3.0),
    "a class's default": lambda m: (delattr(m.layers[0].config, "gain"), setattr(Config, "gain", 4.0)),
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Layer, "shared"), (Layer, "forward"), (nn.Tanh, "forward"), (Config, "gain")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setitem(STATE, "scale", 2.0)


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("traced", [True, False], ids=["traced", "plainly"])
@pytest.mark.parametrize("stacked", [(), "layers"], ids=["as it is", "stacked"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_followed(change: str, stacked: Any, traced: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.linspace(-1, 1, 6).reshape(2, 3)
    fn, params = ta.functionalize(model, stacked=stacked)
    run = ta.jit(fn, backend="eager") if traced else fn
    torch.testing.assert_close(run(params, x), model(x))
    CHANGES[change](model)
    CHANGES[change](fn.module)
    try:
        after = run(params, x)
    except LoopError:
        assert stacked
        return
    torch.testing.assert_close(after, model(x))


class Other(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 1


class Relu(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def exchange(m: Any) -> None:
    m.layers[0].linear, m.layers[1].linear = m.layers[1].linear, m.layers[0].linear


def wrap(m: Any) -> None:
    m.layers[0].linear = nn.Sequential(m.layers[0].linear, nn.ReLU())


# Changes of which modules have which tensors, and of what class they are.
OF_STRUCTURE: dict[str, Callable[[Any], Any]] = {
    "no bias": lambda m: setattr(m.layers[0].linear, "bias", None),
    "a bias less": lambda m: m.layers[0].linear.register_parameter("bias", None),
    "class of a layer": lambda m: setattr(m.layers[1], "__class__", Other),
    "class of a part": lambda m: setattr(m.layers[1].act, "__class__", Relu),
    "exchanged parts": exchange,
    "a part within another": wrap,
    "moved to another attribute": lambda m: m.layers.insert(0, m.layers.pop(2)),
    "a part of another name": lambda m: setattr(m.layers[0], "act", m.layers[1].linear),
    "tied": lambda m: setattr(m.layers[0].linear, "weight", m.layers[1].linear.weight),
}


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "plainly"])
@pytest.mark.parametrize("change", OF_STRUCTURE)
def test_a_change_of_structure_is_followed(change: str, traced: bool) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.linspace(-1, 1, 6).reshape(2, 3)
    fn, params = ta.functionalize(model)
    params = {k: p.clone() for k, p in params.items()}
    run = ta.jit(fn, backend="eager") if traced else fn
    torch.testing.assert_close(run(params, x), model(x))
    for changed in (model, fn.module):
        OF_STRUCTURE[change](changed)
    torch.testing.assert_close(run(params, x), model(x))


WITHOUT_VALUES: dict[str, Callable[[Any], Any]] = {
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.layers[0].linear),
    "with another parameter": lambda m: m.register_parameter("more", nn.Parameter(X_META)),
    "with another buffer": lambda m: m.layers[0].register_buffer("more", X_META),
}
X_META = torch.ones(3, device="meta")


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "plainly"])
@pytest.mark.parametrize("change", WITHOUT_VALUES)
def test_tensors_of_which_no_call_has_a_value_are_refused(change: str, traced: bool) -> None:
    fn, params = ta.functionalize(Model())
    run = ta.jit(fn, backend="eager") if traced else fn
    for _ in range(2):
        run(params, torch.ones(2, 3))
    WITHOUT_VALUES[change](fn.module)
    with pytest.raises(PurityError, match=r"now has '.*', which .*functionalize the changed module"):
        run(params, torch.ones(2, 3))


UNIFORM = [f"{name}, all" for name in ("number", "flag", "list", "item", "function", "mode")]


@pytest.mark.parametrize("change", [*UNIFORM, "class", "forward of the class", "mode of the model"])
def test_equal_changes_of_all_stacked_layers_are_no_error(change: str) -> None:
    model, x = Model(), torch.ones(2, 3)
    fn, params = ta.functionalize(model, stacked="layers")
    for changed in (model, fn.module):
        CHANGES[change](changed)
    torch.testing.assert_close(fn(params, x), model(x))
