"""Laws in use: what torch raises is said by the law, calls are few, and modules are left as they are."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torchard import random
from torchard.testing import (
    batch_independent,
    causal,
    check_batching,
    check_derivatives,
    check_pure,
    equal,
    invariant,
    inverse,
    monotone,
    padding_invariant,
    permutation_equivariant,
    strategies,
)

X = random.normal(random.key(0), (3, 5, 4))
W = random.normal(random.key(1), (4, 4))
ROWS = random.normal(random.key(2), (3, 4))
LENGTHS = torch.tensor([5, 2, 3])
VALUES = ("value", "gradient")
POOLED: dict[str, Any] = {"per_position": False}

# -- raised by torch, and said by the law -------------------------------------------------------------


def test_examples_that_are_not_taken_alone() -> None:
    def squeezed(x: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(x.squeeze(0)))  # of one example, it is another shape

    def several(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return x.sin()

    with pytest.raises(ValueError, match="without 3 examples along dim 0; out_dim is"):
        batch_independent(lambda x: x.sum(), ROWS)
    with pytest.raises(AssertionError, match=r"depend on their number: .* BatchNorm .*module.eval"):
        batch_independent(several, ROWS)
    with pytest.raises(AssertionError, match="depend on"):
        batch_independent(squeezed, ROWS)


def test_what_vmap_does_not_take() -> None:
    norm = torch.nn.BatchNorm1d(4)
    for fn in (norm, lambda x: x if x.sum() > 0 else -x, lambda x: x[x > 0].sum()):
        with pytest.raises(
            TypeError, match=r"check_batching: fn takes each example, and torch.vmap"
        ):
            check_batching(fn, ROWS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        check_batching(lambda x: x @ W[:3], ROWS)


def test_lengths_are_the_laws_own() -> None:
    def masked(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.shape[1]) < lengths[:, None])[..., None]

    def optional(x: torch.Tensor, lengths: Any = None) -> torch.Tensor:
        return (x if lengths is None else masked(x, lengths)).flip(1)

    with pytest.raises(TypeError, match=r"fn needs its lengths, by position: .*\(fn, x, lengths, "):
        padding_invariant(masked, X, lengths=LENGTHS)
    with pytest.raises(
        AssertionError, match=r"fn is called without its lengths: pass it by position"
    ):
        padding_invariant(
            lambda x, lengths=None: optional(x, lengths).sum(1), X, lengths=LENGTHS, **POOLED
        )
    assert padding_invariant(lambda x, *masks, **lengths: x, X, lengths=LENGTHS).good
    for fn in (masked, optional):
        assert padding_invariant(
            lambda x, n, f=fn: f(x, n).sum(1), X, LENGTHS, lengths=LENGTHS, **POOLED
        ).good


# -- what a law costs, and leaves ---------------------------------------------------------------------


@pytest.mark.parametrize("at", [(0, 1), (17, 16), (63, 0), (40, 41)])
def test_one_of_many_examples_that_depends_on_another(at: tuple[int, int]) -> None:
    x, (to, source) = random.normal(random.key(6), (64, 2)), at
    place = (torch.arange(64) == to)[:, None]
    calls: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x.sin()

    assert batch_independent(counted, x, orders=("value",)).good
    assert len(calls) < 40
    with pytest.raises(AssertionError, match="depend on other examples"):
        batch_independent(
            lambda x: x + place[: len(x)] * 1e-3 * x[source % len(x)], x, orders=VALUES
        )


def test_determinants_of_examples_that_depend_on_one_another() -> None:
    def mixed(x: torch.Tensor) -> Any:
        y = 2 * x + 0.5 * x.roll(1, 0)
        return y, torch.full((len(x),), 4.0).log() * 2

    def back(y: torch.Tensor) -> Any:
        n = len(y)
        mix = 2 * torch.eye(n) + 0.5 * torch.eye(n).roll(1, 0)
        return torch.linalg.solve(mix, y), -torch.full((n,), 4.0).log() * 2

    for n in (2, 3):
        assert inverse(mixed, back, ROWS[:n], log_det=True).good


def test_log_determinants_in_half_precision() -> None:
    def scaled(x: torch.Tensor) -> Any:
        return x * 3, x.new_full((len(x),), 3.0).log() * x.shape[1]

    def back(y: torch.Tensor) -> Any:
        return y / 3, -y.new_full((len(y),), 3.0).log() * y.shape[1]

    assert inverse(scaled, back, ROWS.bfloat16(), log_det=True).good


def test_recurrent_networks_are_causal() -> None:
    torch.manual_seed(0)
    lstm, x = torch.nn.LSTM(4, 8, 2, batch_first=True), random.normal(random.key(7), (2, 24, 4))
    begin = time.perf_counter()
    assert causal(lambda x: lstm(x)[0], x).good
    assert time.perf_counter() - begin < 10  # bounds of its gradients would take a minute


NORM = torch.nn.BatchNorm1d(4)


@pytest.mark.parametrize(
    "check",
    [
        lambda fn: invariant(fn, lambda x: (x + 1,), ROWS),
        lambda fn: equal(fn, fn, ROWS),
        lambda fn: equal(fn, lambda x: fn(x) + 1, ROWS),
        lambda fn: check_derivatives(fn, ROWS, order=1),
        lambda fn: check_pure(fn, ROWS),
        lambda fn: monotone(fn, ROWS),
    ],
)
def test_modules_are_left_as_they_are(check: Any) -> None:
    own = torch.nn.BatchNorm1d(4)
    for fn, norm in ((lambda x: own(x), own), (lambda x: NORM(x), NORM), (own, own)):
        before = {name: b.clone() for name, b in norm.named_buffers()}
        with contextlib.suppress(AssertionError, TypeError):
            check(fn)
        assert all(torch.equal(b, before[name]) for name, b in norm.named_buffers())


def test_the_remedy_of_draws_works() -> None:
    dropout = torch.nn.Dropout(0.5)
    with pytest.raises(
        AssertionError, match=r"module.eval\(\), or draw .* a key of torchard.random"
    ):
        check_pure(dropout, ROWS)
    assert check_pure(dropout.eval(), ROWS).traceable
    assert check_pure(lambda key, x: x * random.normal(key, (3, 4)), random.key(0), ROWS).traceable

    def of_a_seed(seed: int, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))

    assert check_pure(of_a_seed, 0, ROWS)


@pytest.mark.parametrize("check", [batch_independent, permutation_equivariant])
def test_draws_by_place_are_told(check: Any) -> None:
    torch.manual_seed(0)
    dropout = torch.nn.Dropout(0.5)
    for fn in (dropout, F.dropout):
        with pytest.raises(
            AssertionError, match=r"fn draws from torch's global generator, and the numbers"
        ):
            check(fn, ROWS)
    assert check(dropout.eval(), ROWS).good
    with pytest.raises(AssertionError, match=r"^(examples|not equivariant)"):
        check(lambda x: x + 0 * x[:1] + torch.arange(len(x))[:, None], ROWS)


def test_a_module_where_a_strategy_makes_some() -> None:
    with pytest.raises(TypeError, match=r"each example needs its own: lambda: Linear\(...\)"):
        strategies.modules(torch.nn.Linear(1, 1))
