"""equal compares whatever a function returns: numbers, dtypes, objects, and the tree that they are in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from torchard.testing import check_dtypes, equal
from torchard.testing.equal import Reference

X = torch.randn(2, 4)


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


def fresh(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


@pytest.mark.parametrize("around", AROUND)
def test_every_difference_of_results_is_seen(around: str) -> None:
    wrap = AROUND[around]

    def returning(value: Any) -> Callable[[torch.Tensor], Any]:
        return lambda x: wrap(x * 2, fresh(value))

    for i, theirs in enumerate(DIFFERENT):
        reference = Reference(returning(theirs), (X,), ["value"])
        for j, ours in enumerate(DIFFERENT):
            if i == j:
                assert reference.check(returning(ours), X).good
            else:
                with pytest.raises(AssertionError):
                    reference.check(returning(ours), X)


def test_what_has_no_equality_is_refused_with_the_way_out() -> None:
    with pytest.raises(AssertionError, match=r"a Plain cannot be compared: .*torchard\.tree\.register"):
        equal(lambda x: (x, Plain()), lambda x: (x, Plain()), X)
    same = Plain()
    equal(lambda x: (x, same), lambda x: (x, same), X)


def test_what_is_no_number_is_shown() -> None:
    x = torch.tensor([1.0, -1.0])
    with pytest.raises(AssertionError, match=r"<-- at \[1\], nan, reference 0"):
        equal(torch.sqrt, lambda x: x.clamp(min=0).sqrt(), x, orders=["value"])
    with pytest.raises(AssertionError, match=r"<-- at \[0\], 1, reference inf"):
        equal(lambda x: x, lambda x: x / 0, x, orders=["value"])


def test_what_modules_do_not_share_is_named() -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, (4,), self.gain)

    report = equal(Norm(), torch.nn.RMSNorm(4), X, orders=["value"])
    assert report.good and "the names of the modules' parameters differ" in str(report)
    wrong = torch.nn.BatchNorm1d(4)
    torch.nn.init.zeros_(wrong.running_var)
    with pytest.raises(AssertionError, match=r"buffer running_var .* <--"):
        equal(wrong, torch.nn.BatchNorm1d(4), X)


def test_complex_arguments_are_of_each_precision() -> None:
    report = check_dtypes(lambda z: z.abs().sum(), torch.tensor([1 + 2j, 0.5j]))
    assert [row.path for row in report][:2] == ["float64: out", "float64: gradient of args[0]"]
    assert report.good
