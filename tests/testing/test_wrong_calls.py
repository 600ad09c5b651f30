"""Laws say which word of a call they do not know, and compare what they are asked to, no more."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Holds:
    """A law that compares, of a function that obeys it: what it takes besides that."""

    others: tuple[Any, ...] = ()
    fn: Callable[..., Any] = curve
    x: torch.Tensor = X
    named: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, orders: Any) -> Any:
        return getattr(testing, name)(self.fn, *self.others, self.x, orders=orders, **self.named)


COMPARING: dict[str, Holds] = {
    "equal": Holds((curve,)),
    "check_batching": Holds(),
    "check_dtypes": Holds(),
    "check_sharding": Holds((TP, (P("tp"),))),
    "check_checkpoint": Holds(([policies.save_nothing],)),
    "invariant": Holds((lambda x: (-x,),)),
    "equivariant": Holds((lambda x: (x.flip(0),), lambda y: y.flip(0))),
    "homogeneous": Holds((0.0,), fn=torch.sign),
    "inverse": Holds((torch.asinh,), fn=torch.sinh),
    "idempotent": Holds(fn=torch.relu),
    "batch_independent": Holds(),
    "permutation_equivariant": Holds(),
    "permutation_invariant": Holds(fn=torch.sum),
    "causal": Holds(fn=lambda x: x.cumsum(0), named={"in_dims": 0, "out_dim": 0}),
    "check_associative": Holds((X + 1, X + 2), fn=torch.mul),
    "padding_invariant": Holds(x=X[None], named={"lengths": torch.tensor([2])}),
}


def test_all_laws_that_compare_derivatives_are_here() -> None:
    laws = [name for name in testing.__all__ if inspect.isfunction(getattr(testing, name))]
    comparing = [n for n in laws if "orders" in inspect.signature(getattr(testing, n)).parameters]
    assert sorted(comparing) == sorted(COMPARING)


@pytest.mark.parametrize("name", COMPARING)
def test_orders_are_words_that_are_known(name: str) -> None:
    for orders in (("value", "gradeint"), ()):
        with pytest.raises(ValueError, match="some of 'value', 'gradient', 'jvp', 'second'"):
            COMPARING[name].check(name, orders)
    with pytest.raises(
        TypeError, match=f"{name}: orders is 'value' .a str., but orders must be a list"
    ):
        COMPARING[name].check(name, "value")


@pytest.mark.parametrize("name", COMPARING)
def test_what_is_not_asked_for_is_not_compared(name: str) -> None:
    report = COMPARING[name].check(name, ("value",))
    paths = {row.path.rpartition(": ")[2].partition("[")[0] for row in report}  # after the dtype
    assert report.good and paths == {"out"}


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
    with pytest.raises(
        TypeError, match=r"which is not a stack.*\[\(\"grad\", \"shard\"\), \(\"jit\",\)\]"
    ):
        check_stack(curve, words, X)


@pytest.mark.parametrize("layer", ["gard", "", None, 3, ["grad"]])
def test_layers_are_words_that_are_known(layer: Any) -> None:
    known = "layers are backward, checkpoint, compiled, fuse, grad, .* vmap, or functions"
    with pytest.raises(ValueError, match=known):
        check_stack(curve, [("grad", layer)], X)
