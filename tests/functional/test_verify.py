"""verify: it passes what is right, and says where something is not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from dummies import Split, halves

from torchard.functional.engine.transformed import Transformed
from torchard.functional.verify import verify


def f(p: dict[str, torch.Tensor], x: torch.Tensor, n: int = 2) -> dict[str, Any]:
    h = (x @ p["w"]).tanh() * n
    return {"h": h, "top": h.argmax(-1), "n": n}


P = {"w": torch.randn(4, 4)}
X = torch.randn(2, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_function_verifies_against_itself(dtype: torch.dtype) -> None:
    report = verify(f, f, {"w": P["w"].to(dtype)}, X.to(dtype))
    assert [row.path for row in report] == [
        "out['h']", "out['n']", "out['top']", "gradient of args[0]['w']", "gradient of args[1]",
    ]  # fmt: skip
    assert len(verify(f, f, P, X, grads=False)) == 3


def test_placed_values_are_compared_whole() -> None:
    p = {"w": halves(P["w"])}
    report = verify(Transformed(f, [Split()]), f, p, X)
    assert "gradient of args[0]['w']" in [row.path for row in report]


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.001


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda p, x: {**f(p, x), "h": f(p, x)["h"] * 1.001}, "out['h']"),
        (lambda p, x: f({"w": Wrong.apply(p["w"])}, x), "gradient of args[0]['w']"),
        (lambda p, x: {**f(p, x), "top": f(p, x)["top"] + 1}, "out['top']"),
        (lambda p, x: {**f(p, x), "h": f(p, x)["h"].double()}, "dtype"),
        (lambda p, x: {**f(p, x), "h": f(p, x)["h"][:1]}, "shape [1, 4], reference [2, 4]"),
        (lambda p, x: {**f(p, x), "h": f(p, x)["h"] / 0}, "out['h']"),
        (lambda p, x: {"top": f(p, x)["top"]}, "fn has no such value"),
        (lambda p, x: {**f(p, x), "n": 3}, "3, reference 2"),
    ],
)
def test_what_differs_is_named(wrong: Any, where: str) -> None:
    with pytest.raises(AssertionError) as error:
        verify(wrong, f, P, X)
    bad = [line for line in str(error.value).splitlines() if "<--" in line]
    assert any(where in line for line in bad)


def test_a_reference_that_depends_on_the_dtype() -> None:
    def shorter_in_float64(x: torch.Tensor) -> torch.Tensor:
        return x[:1] * 2 if x.dtype == torch.float64 else x * 2

    with pytest.raises(AssertionError, match="the reference returns something else in float64"):
        verify(lambda x: x * 2, shorter_in_float64, X, grads=False)


def test_one_element_of_many_is_seen() -> None:
    x, place = torch.ones(100_000), torch.arange(100_000)
    with pytest.raises(AssertionError, match="out"):
        verify(lambda x: torch.where(place == 7, 1.001 * x, x), lambda x: 1 * x, x, grads=False)


def test_closer_than_eager_is_good_enough() -> None:
    """The tolerance is no judge of two orders of a sum; float64 is."""
    x = torch.rand(400, generator=torch.Generator().manual_seed(1))

    def naive(x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, x.unbind())

    def careful(x: torch.Tensor) -> torch.Tensor:
        return x.double().sum().float()

    (row,) = verify(careful, naive, x, grads=False, tolerance=0.0)
    assert row.error > 0 and row.eager > row.error
    with pytest.raises(AssertionError):
        verify(naive, careful, x, grads=False, tolerance=0.0)


# -- what is no tensor ------------------------------------------------------------------------------


class Plain:
    """Compared by identity, as most objects are."""


class Sized(NamedTuple):
    n: Any
    rest: Any


# Values of which no two are the same result.
DIFFERENT: list[Any] = [
    3.0, 4.0, 3, 4, True, False, None, "3", "4", 3 + 1j, float("nan"), float("inf"), -float("inf"),
    torch.float32, torch.device("meta"), torch.Size([3]), (), [], {}, (3,), [3], {"n": 3},
    Sized(3, 4), Sized(3, 5), slice(3), range(3), frozenset({3}), b"3",
    torch.tensor(3.0), torch.tensor(3), torch.tensor([3.0]), torch.tensor([]),
]  # fmt: skip
AROUND: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "alone": lambda y, value: value,
    "in a tuple": lambda y, value: (y, value),
    "in a dict": lambda y, value: {"y": y, "n": [value]},
    "with itself": lambda y, value: [value, y, value],
}


@pytest.mark.parametrize(
    ("around", "grads"), [*((around, False) for around in AROUND), ("in a tuple", True)]
)
def test_every_difference_of_results_is_seen(around: str, grads: bool) -> None:
    wrap = AROUND[around]
    for i, ours in enumerate(DIFFERENT):
        for j, theirs in enumerate(DIFFERENT):

            def fn(x: torch.Tensor, value: Any = ours) -> Any:
                return wrap(x * 2, copy.deepcopy(value))

            def reference(x: torch.Tensor, value: Any = theirs) -> Any:
                return wrap(x * 2, copy.deepcopy(value))

            if i == j:
                verify(fn, reference, X, grads=grads)
            else:
                with pytest.raises(AssertionError, match="fn differs from its reference"):
                    verify(fn, reference, X, grads=grads)


def test_numbers_read_from_tensors_are_compared_as_tensors_are() -> None:
    """float32 rounds; two ways to round are not two results."""

    def mean(x: torch.Tensor) -> Any:
        return {"mean": x.mean().item(), "kind": x.dtype}

    def by_sum(x: torch.Tensor) -> Any:
        return {"mean": x.double().mean().item(), "kind": x.dtype}

    x = torch.rand(1000, generator=torch.Generator().manual_seed(1))
    rows = {row.path: row for row in verify(by_sum, mean, x)}
    assert rows["out['mean']"].eager > rows["out['mean']"].error
    with pytest.raises(AssertionError, match="mean"):
        verify(lambda x: {"mean": 1.001 * mean(x)["mean"], "kind": x.dtype}, mean, x)


def test_what_has_no_equality_is_refused_with_the_way_out() -> None:
    with pytest.raises(AssertionError, match=r"a Plain cannot be compared: .*torchard\.tree\.register"):
        verify(lambda x: (x, Plain()), lambda x: (x, Plain()), X)
    same = Plain()
    verify(lambda x: (x, same), lambda x: (x, same), X)
