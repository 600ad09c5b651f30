"""A decomposition written against public names, for an operator of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchard import Mesh, P, place, register_decomposition, register_rule, shard
from torchard.sharding.layouts.factors import RuleError
from torchard.testing import check_sharding

MESH = Mesh({"x": 2}, virtual=True)


def centered(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def operator_of(name: str) -> Any:
    """The overload of a new operator, which computes the same."""
    op = torch.library.custom_op(f"torchard_extension::{name}", centered, mutates_args=())
    op.register_fake(torch.empty_like)
    return getattr(torch.ops.torchard_extension, name).default


@pytest.mark.parametrize("rule", [None, "... d -> ... d | whole d"])
def test_statistics_are_sent_and_no_values(rule: str | None) -> None:
    op = operator_of("centered_by_rule" if rule else "centered")
    if rule:
        register_rule(op, text=rule)
    register_decomposition(op, fn=centered)
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    placed = place(x, MESH, P(None, "x"))
    sent = shard(lambda x: op(x), MESH).lower(placed).collectives
    assert [(c.kind, tuple(c.shape)) for c in sent] == [("all_reduce", (4, 1))]
    check_sharding(lambda x: op(x), MESH, (P(None, "x"),), x, orders=["value"])


def off_by_a_thousandth(x: torch.Tensor) -> torch.Tensor:
    return centered(x) * 1.001


def of_a_sum(x: torch.Tensor) -> torch.Tensor:
    return x - x.sum(-1, keepdim=True)


@pytest.mark.parametrize("wrong", [off_by_a_thousandth, of_a_sum])
def test_one_that_is_wrong_is_refused(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    op = operator_of(f"centered_{wrong.__name__}")
    register_decomposition(op, fn=wrong)
    with pytest.raises(RuleError, match=r"of shapes \[\[4, 6\]\] its values differ by up to \d"):
        shard(lambda x: op(x), MESH).lower(place(torch.ones(4, 6), MESH, P(None, "x")))


def test_results_of_another_dtype_are_named() -> None:
    op = operator_of("centered_in_double")
    register_decomposition(op, fn=lambda x: centered(x).double())
    with pytest.raises(RuleError, match=r"returns float64\[4, 6\] instead of float32\[4, 6\]\. It"):
        shard(lambda x: op(x), MESH).lower(place(torch.ones(4, 6), MESH, P(None, "x")))


@pytest.mark.parametrize("register", [
    lambda op: register_decomposition(op, fn=centered),
    lambda op: register_rule(op, text="... d -> ... d | whole d"),
])
def test_what_is_no_overload_is_refused(register: Callable[[Any], None]) -> None:
    op = torch.library.custom_op("torchard_extension::centered_op", centered, mutates_args=())
    for target in (op, torch.ops.torchard_extension.centered_op, "centered_op", torch.sin):
        with pytest.raises(TypeError, match=r"pass overloads of operators, such as torch.ops.mine"):
            register(target)
