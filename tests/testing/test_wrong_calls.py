"""Laws say which word of a call they do not know, and compare what they are asked to, no more."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchard.functional.engine.lowered_function as lowered_function
from torchard import Mesh, P, jit, policies, shard, testing
from torchard.testing import check_checkpoint, check_sharding, check_stack, equal

X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 7
TP = Mesh({"tp": 2}, virtual=True)


def curve(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * x)


# What each law that compares takes besides the function and its arguments.
COMPARING: dict[str, tuple[Any, ...]] = {
    "equal": (curve,),
    "check_batching": (),
    "check_dtypes": (),
    "check_sharding": (TP, (P("tp"),)),
    "check_checkpoint": ([policies.save_nothing],),
    "invariant": (lambda x: (-x,),),
    "equivariant": (lambda x: (x.flip(0),), lambda y: y.flip(0)),
    "homogeneous": (0.0,),
}


def test_all_laws_that_compare_derivatives_are_here() -> None:
    laws = [name for name in testing.__all__ if inspect.isfunction(getattr(testing, name))]
    comparing = [n for n in laws if "orders" in inspect.signature(getattr(testing, n)).parameters]
    assert sorted(comparing) == sorted(COMPARING)


@pytest.mark.parametrize("name", COMPARING)
def test_orders_are_words_that_are_known(name: str) -> None:
    law: Callable[..., Any] = getattr(testing, name)
    for orders in (("value", "gradeint"), ()):
        with pytest.raises(ValueError, match="some of 'value', 'gradient', 'jvp', 'second'"):
            law(curve, *COMPARING[name], X, orders=orders)
    with pytest.raises(TypeError, match=f"{name}: orders is 'value' .a str., but orders must be a list"):
        law(curve, *COMPARING[name], X, orders="value")


@pytest.mark.parametrize("name", sorted(set(COMPARING) - {"homogeneous"}))
def test_what_is_not_asked_for_is_not_compared(name: str) -> None:
    report = getattr(testing, name)(curve, *COMPARING[name], X, orders=("value",))
    assert report.good and {row.path for row in report} == {"out"}


@pytest.mark.parametrize(
    "check",
    [
        lambda: check_sharding(curve, TP, (P("tp"),), X, orders=("value",)),
        lambda: check_checkpoint(curve, [policies.save_nothing] * 3, X, orders=("value",)),
    ],
)
def test_the_plain_function_is_evaluated_once(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[], Any]
) -> None:
    module = sys.modules["torchard.testing.equal"]  # the name of the package is the function's
    counted = Counted(module.expected)
    monkeypatch.setattr(module, "expected", counted)
    assert check().good
    assert counted.calls == 1


def test_second_gradients_derive_no_third_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(lowered_function.joint)
    monkeypatch.setattr(lowered_function, "joint", counted)
    equal(shard(curve, TP, (P("tp"),)), curve, X, orders=("second",))
    assert counted.calls == 1  # of the gradient, whose gradient is its pullback


class Counted:
    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn, self.calls = fn, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.fn(*args, **kwargs)


@pytest.mark.parametrize("words", ["grad", ["grad", "shard"], ("grad", "shard"), jit, 3, [None]])
def test_one_stack_is_no_list_of_stacks(words: Any) -> None:
    with pytest.raises(TypeError, match=r"which is no stack.*\[\(\"grad\", \"shard\"\), \(\"jit\",\)\]"):
        check_stack(curve, words, X)


@pytest.mark.parametrize("layer", ["gard", "", None, 3, ["grad"]])
def test_layers_are_words_that_are_known(layer: Any) -> None:
    known = "layers are checkpoint, fuse, grad, jit, jvp, shard, vmap, or functions"
    with pytest.raises(ValueError, match=known):
        check_stack(curve, [("grad", layer)], X)
