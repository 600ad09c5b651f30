"""Functions made of modules that other modules hold: their scopes begin at the path of the attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_size import fuse
from torch import Tensor, nn

from torchard import checkpoint, functionalize, jit, saved_residuals, scope, trace

X = torch.ones(2, 3)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 3)
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.up(x).sin())


class Plain(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(3, 3), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


class Holder(Plain):
    def __init__(self, fn: Any, params: Any, calls: Callable[[Any], Any] = lambda fn: fn) -> None:
        super().__init__(fn)
        self.calls, self.names = calls, list(params)
        self.params = nn.ParameterList(params.values())

    def forward(self, x: Tensor) -> Tensor:
        params = dict(zip(self.names, self.params, strict=True))
        return self.calls(self.inner)(params, self.before(x))


class Top(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).cos()


def scopes(fn: Any, *args: Any) -> set[str | None]:
    return {node.meta.get("scope") for node in trace(fn)(*args).calls}


HELD: dict[str, Callable[[Any, Any], nn.Module]] = {
    "attribute": Holder,
    "checkpoint": lambda fn, params: Holder(checkpoint(fn), params),
    "jit of fuse": lambda fn, params: Holder(jit(fuse(fn), backend="eager"), params),
}


@pytest.mark.parametrize("held", HELD)
def test_scopes_are_those_of_a_module_at_the_attribute(held: str) -> None:
    fn, params = functionalize(Inner())
    want = scopes(*functionalize(Top(Plain(Inner()))), X)
    assert "block.inner.layers.0" in want
    outer, given = functionalize(Top(HELD[held](fn, params)))
    assert scopes(outer, given, X) == want
    assert not any("block" in str(name) for name in scopes(fn, params, X))


def test_paths_of_lists_dicts_and_functions_in_functions() -> None:
    fn, params = functionalize(Inner())
    listed = Top(Holder([fn], params, lambda held: held[0]))
    named = Top(Holder({"a": fn}, params, lambda held: held["a"]))
    for module, path in ((listed, "block.inner.0.layers.0"), (named, "block.inner.a.layers.0")):
        assert path in scopes(*functionalize(module), X)
    middle, its = functionalize(Holder(fn, params))
    assert "block.inner.inner.layers.0" in scopes(*functionalize(Top(Holder(middle, its))), X)


def test_functions_that_no_attribute_holds_are_within_the_scope_of_the_call() -> None:
    fn, params = functionalize(Inner())

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with scope("own"):
                return fn(params, self.before(x))

    assert "block/own/layers.0" in scopes(*functionalize(Top(Calls())), X)


def test_patterns_select_what_a_module_holds() -> None:
    fn, params = functionalize(Inner())
    outer, given = functionalize(Top(Holder(fn, params)))
    run = checkpoint(outer, where="block.inner")
    kept = saved_residuals(lambda p: run(p, X).sum(), given)
    assert "output of block.inner" in {residual.why for residual in kept}
    want = torch.func.grad(lambda p: outer(p, X).sum())(given)
    torch.testing.assert_close(torch.func.grad(lambda p: run(p, X).sum())(given), want)
