"""Errors of a traced function name its line and the call that failed; torch's log adds nothing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from torchard import Mesh, P, checkpoint, functionalize, jit, scope, shard, shard_map, trace

X, W = torch.ones(4, 6), torch.ones(3, 6)
MESH = Mesh({"tp": 2}, virtual=True)


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x.relu() @ w).sum()  # fails


def added(x: Tensor, w: Tensor) -> Tensor:
    return (x + w).sum()  # fails


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(
        x, w, torch.zeros(5)).sum()  # fails


def joined(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x, w], dim=1).sum()  # fails


def reshaped(x: Tensor, w: Tensor) -> Tensor:
    return x.view(5, 5).sum()  # fails


CALLS: dict[Callable[..., Any], str] = {
    product: "matmul(float32[4, 6], float32[3, 6])",
    added: "add(float32[4, 6], float32[3, 6])",
    linear: "linear(float32[4, 6], float32[3, 6], float32[5])",
    joined: "cat([float32[4, 6], float32[3, 6]], dim=1)",
    reshaped: "view(float32[4, 6], 5, 5)",
}
WAYS: dict[str, Callable[..., Any]] = {
    "shard": lambda f: shard(f, MESH),
    "shard_map": lambda f: shard_map(f, MESH, (P(), P()), P()),
    "jit of checkpoint": lambda f: jit(checkpoint(f), backend="eager"),
    "grad of fuse": lambda f: torch.func.grad(fuse(f)),
    "shard of grad": lambda f: shard(torch.func.grad(f), MESH),
    "trace": trace,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fn", CALLS, ids=lambda fn: fn.__name__)
def test_the_line_and_the_shapes_are_noted_once_and_nothing_is_logged(
    fn: Callable[..., Any], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError) as caught:
        WAYS[way](fn)(X, W)
    notes = [note for note in caught.value.__notes__ if "raised at" in note]
    lines, first = inspect.getsourcelines(fn)
    failing = next(i for i, line in enumerate(lines, first) if "# fails" in line or "F.linear" in line)
    assert notes == [f"raised at test_failed_calls.py:{failing} in {fn.__name__}, by {CALLS[fn]}"]
    assert not caplog.records


def test_operands_that_are_arguments_are_named() -> None:
    def fn(tree: dict[str, Tensor], *, other: Tensor) -> Tensor:
        with scope("block/1"):
            return tree["w"] @ other

    for way in ("shard", "jit of checkpoint", "trace"):
        with pytest.raises(RuntimeError) as caught:
            WAYS[way](fn)({"w": X, "unused": W}, other=W)
        assert caught.value.__notes__[1:] == [
            "in block/1, where args[0]['w'] is float32[4, 6] and kwargs['other'] is float32[3, 6]"
        ]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).sum()


MODULES: dict[str, Callable[..., Any]] = {
    "plain": lambda f: f,
    "grad": torch.func.grad,
    "shard of grad": WAYS["shard of grad"],
    "shard": WAYS["shard"],
    "jit of checkpoint": WAYS["jit of checkpoint"],
    "vmap": lambda f: torch.func.vmap(checkpoint(f), (None, 0)),
}
WRONG: dict[str, tuple[str, str, tuple[int, ...]]] = {
    "matrix": ("", "layers.1.weight", (6, 5)),
    "vector": ("", "scale", (7,)),
    "transposed": ("", "layers.0.bias", (2, 3)),
    "stacked": ("layers", "layers.*.weight", (2, 6, 5)),
    "a row too few": ("layers", "layers.*.weight", (1, 6, 6)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("way", MODULES)
def test_a_parameter_of_another_shape_is_named(way: str, wrong: str) -> None:
    stacked, name, shape = WRONG[wrong]
    fn, params = functionalize(Inner(), stacked=stacked or ())
    have = list(params[name].shape)
    params[name] = torch.ones(shape)
    with pytest.raises(Exception) as caught:  # torch's, of several classes
        MODULES[way](fn)(params, X)
    notes = caught.value.__notes__
    said = f"params[{name!r}] is {list(shape)}, and {have} in the module that was functionalized"
    assert [note for note in notes if "functionalized" in note] == [said]
    if way not in ("plain", "grad") and not stacked:
        layer = name.rpartition(".")[0]
        assert any(note.startswith("raised at test_failed_calls.py:") for note in notes)
        assert any(f"args[0][{name!r}] is float32{list(shape)}" in note for note in notes)
        assert any(note.startswith(f"in {layer}, where") for note in notes) == bool(layer)


def test_an_error_outside_of_torch_has_the_line() -> None:
    def misspelt(x: Tensor) -> Any:
        return x.summ()

    with pytest.raises(AttributeError) as caught:
        shard(misspelt, MESH)(X)
    (note,) = caught.value.__notes__
    assert note.startswith("raised at test_failed_calls.py:")


def test_an_error_that_the_function_catches_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    def tries(x: Tensor, w: Tensor) -> Tensor:
        try:
            return x @ w
        except RuntimeError:
            return x @ w.T

    assert shard(tries, MESH)(X, W).shape == (4, 3)
    assert not caplog.records


def test_errors_of_other_fake_tensors_are_logged_as_before(caplog: pytest.LogCaptureFixture) -> None:
    with FakeTensorMode(), caplog.at_level(logging.ERROR), pytest.raises(RuntimeError):
        torch.ones(4, 6) @ torch.ones(4, 6)
    assert caplog.records
