"""Functions of torch that a user has replaced by ones that call the original are applied once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from derivation_cases import whole
from torch import Tensor

import torchard as ta

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


def wrapped(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) + 1

    return function


class Wrapper:
    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs) * 2


def graded(original: Callable[..., Any]) -> Any:
    return torch.enable_grad()(wrapped(original))


PLACES: dict[str, tuple[Any, str, Callable[[Tensor], Tensor]]] = {
    "F.relu": (F, "relu", lambda x: F.relu(x)),
    "F.softmax": (F, "softmax", lambda x: F.softmax(x, -1)),
    "F.layer_norm": (F, "layer_norm", lambda x: F.layer_norm(x, [4])),
    "F.gelu": (F, "gelu", lambda x: F.gelu(x)),
    "F.dropout": (F, "dropout", lambda x: F.dropout(x, 0.5, training=False)),
    "F.one_hot": (F, "one_hot", lambda x: x.sum() * F.one_hot(torch.tensor([0, 2]), 3)),
    "F.max_pool1d": (F, "max_pool1d", lambda x: F.max_pool1d(x[None], 2)),
    "torch.sin": (torch, "sin", lambda x: torch.sin(x)),
    "torch.einsum": (torch, "einsum", lambda x: torch.einsum("...i,ji->...j", x, X)),
    "Tensor.sigmoid": (Tensor, "sigmoid", lambda x: x.sigmoid()),
    "Tensor.add": (Tensor, "add", lambda x: x.add(3) + 1),
    "Tensor.detach": (Tensor, "detach", lambda x: x * x.detach()),
    "Tensor.norm": (Tensor, "norm", lambda x: x.norm(dim=-1)),
    "Tensor.__rsub__": (Tensor, "__rsub__", lambda x: 3 - x),
    "Tensor.__matmul__": (Tensor, "__matmul__", lambda x: x @ X.mT),
    "through a module": (F, "relu", torch.nn.ReLU()),
}


class Module(torch.nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def functionalized(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    fn, params = ta.functionalize(Module(f))
    return lambda x: fn(params, x)


MESH = ta.Mesh({"d": 3}, virtual=True)
STACKS: dict[str, Callable[..., Any]] = {
    "jit": lambda f: ta.jit(f, backend="eager"),
    "checkpoint": ta.checkpoint,
    "shard": lambda f: ta.shard(f, MESH),
    "gradient": lambda f: lambda x: torch.func.grad(lambda x: ta.checkpoint(f)(x).sum())(x),
    "of a gradient": lambda f: ta.checkpoint(torch.func.grad(lambda x: f(x).sum())),
    "batch": lambda f: ta.checkpoint(torch.vmap(f)),
    "functionalized": functionalized,
    "placed": lambda f: lambda x: f(ta.place(x, MESH, ta.P("d"))),
}
PLAIN: dict[str, Callable[..., Any]] = {
    "gradient": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "of a gradient": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "batch": torch.vmap,
}
CASES = [(place, wrapped, stack) for place in PLACES for stack in STACKS] + [
    (place, replaced, "jit")
    for place, (owner, *_) in PLACES.items()
    for replaced in (Wrapper, graded)
    if replaced is not Wrapper or owner is not Tensor  # an object is no method
]


@pytest.mark.parametrize(("place", "replaced", "stack"), CASES)
def test_applied_once(
    place: str, replaced: Callable[..., Any], stack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, f = PLACES[place]
    monkeypatch.setattr(owner, name, replaced(getattr(owner, name)))
    expected = PLAIN.get(stack, lambda f: f)(f)(X)
    value = whole(STACKS[stack](f)(X))
    monkeypatch.undo()
    torch.testing.assert_close(value, expected)
