"""Inverses, batches, sequences, sets and order: right functions hold these laws, wrong ones do not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from torchard import random
from torchard.testing import (
    batch_independent,
    causal,
    equivariant,
    homogeneous,
    idempotent,
    invariant,
    inverse,
    monotone,
    padding_invariant,
    permutation_equivariant,
    permutation_invariant,
)

X = random.normal(random.key(0), (3, 5, 4))
W = random.normal(random.key(1), (4, 4))
ROWS = random.normal(random.key(2), (3, 4))
LENGTHS = torch.tensor([5, 2, 3])
MASK = torch.arange(5) < LENGTHS[:, None]
VALUES = ("value", "gradient")


def attention(x: torch.Tensor, w: torch.Tensor, is_causal: bool = True) -> torch.Tensor:
    return F.scaled_dot_product_attention(x @ w, x, x, is_causal=is_causal)


def masked_attention(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = (x @ x.mT).masked_fill(~mask[:, None, :], -torch.inf)
    return scores.softmax(-1) @ x.where(mask[..., None], 0)


# -- symmetries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [3.0, 1e3, 1e4])
def test_the_rounding_of_an_action_counts(shift: float) -> None:
    x = ROWS[:, :2]
    invariant(lambda x: x.softmax(0), lambda x: (x + shift,), x, orders=VALUES)
    distances = lambda x: (x[:, None] - x[None]).square().sum(-1)  # noqa: E731
    invariant(distances, lambda x: (x + shift,), x, orders=VALUES)
    with pytest.raises(AssertionError, match="not invariant"):
        invariant(lambda x: x.softmax(0) + 1e-2 * x, lambda x: (x + shift,), x, orders=VALUES)


def test_scales_that_are_no_powers_of_two_and_results_without_dims() -> None:
    homogeneous(lambda x: x / x.norm(), 0, ROWS, scale=3.0)
    homogeneous(lambda x: x.square().sum(), 2, ROWS, scale=3.0)
    homogeneous(lambda x: tuple(x.topk(2)), 1, ROWS)
    homogeneous(torch.argmax, 0, ROWS)
    with pytest.raises(AssertionError, match="not homogeneous of degree 1"):
        homogeneous(lambda x: x.norm() + 1e-3, 1, ROWS, scale=3.0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_absolute_values_of_complex_numbers(dtype: torch.dtype) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j, 0.5j, 0j], dtype=dtype)
    homogeneous(torch.abs, 1, z, scale=3.0)
    invariant(torch.abs, lambda z: (z * 1j,), z)
    equivariant(lambda z: z * z.abs(), lambda z: (z * 1j,), lambda y: y * 1j, z)
    with pytest.raises(AssertionError, match="not invariant"):
        invariant(lambda z: z.abs() + 1e-4 * z.real, lambda z: (z * 1j,), z)


# -- inverses -----------------------------------------------------------------------------------------


def flow(x: torch.Tensor, w: torch.Tensor, wrong: float = 0.0) -> Any:
    """An affine coupling."""
    a, b = x.chunk(2, -1)
    scale = torch.tanh(a @ w[:2, :2])
    return torch.cat([a, b * scale.exp() + a], -1), scale.sum(-1) * (1 + wrong)


def flow_back(y: torch.Tensor, w: torch.Tensor, wrong: float = 0.0) -> Any:
    a, b = y.chunk(2, -1)
    scale = torch.tanh(a @ w[:2, :2])
    return torch.cat([a, (b - a) * (-scale).exp()], -1), -scale.sum(-1) * (1 + wrong)


def test_inverses() -> None:
    assert inverse(torch.fft.fft, lambda y: torch.fft.ifft(y).real, X).good
    assert inverse(
        lambda x, y: (x + y, x - y), lambda s, d: ((s + d) / 2, (s - d) / 2), X, X + 1
    ).good
    ids = torch.tensor([3, 0, 2])
    assert inverse(lambda i: F.one_hot(i, 4), lambda hot: hot.argmax(-1), ids).good
    with pytest.raises(AssertionError, match=r"inverse_fn\(fn\(\*args\)\) differs"):
        inverse(torch.fft.fft, lambda y: torch.fft.ifft(y, norm="ortho").real, X)
    with pytest.raises(AssertionError, match="inverse_fn"):  # right in values alone
        inverse(torch.exp, lambda y: y.detach().log(), X)


def test_log_determinants() -> None:
    assert inverse(flow, flow_back, ROWS, W, log_det=True).good
    assert inverse(flow, flow_back, ROWS[0], W, log_det=True, batch_dims=0, orders=VALUES).good
    with pytest.raises(AssertionError, match="not opposite"):
        inverse(flow, lambda y, w: flow_back(y, w, 0.01), ROWS, W, log_det=True)
    with pytest.raises(AssertionError, match="differ from those of its Jacobian"):
        inverse(
            lambda x, w: flow(x, w, 0.01), lambda y, w: flow_back(y, w, 0.01), ROWS, W, log_det=True
        )
    with pytest.raises(ValueError, match="one for each example"):
        inverse(lambda x: (x, x), lambda y: (y, -y), ROWS, log_det=True)
    with pytest.raises(ValueError, match="is square"):
        inverse(lambda x: (x[:, :2], x[:, 0]), lambda y: (y, y[:, 0]), ROWS, log_det=True)


def test_flows_without_log_det_are_told_the_remedy() -> None:
    def flow(x: torch.Tensor) -> Any:
        return 3 * x, x.new_full((len(x),), 3.0).log() * 4

    with pytest.raises(TypeError, match=r"takes 1 positional .*: fn returns a pair, .* log_det=True"):
        inverse(flow, lambda y: (y / 3, -y.new_full((len(y),), 3.0).log() * 4), ROWS)
    with pytest.raises(AssertionError, match=r"differs from args \(fn returns a pair, .*log_det=True"):
        inverse(flow, lambda y, condition: (y / 3, condition), ROWS)
    polar = lambda x, y: (torch.hypot(x, y), torch.atan2(y, x))  # noqa: E731
    assert inverse(polar, lambda r, a: (r * a.cos(), r * a.sin()), X, X + 1).good


def test_projections_are_idempotent() -> None:
    assert idempotent(lambda x: x / x.norm(), ROWS).good
    assert idempotent(lambda x, high: x.clamp(max=high), ROWS, torch.tensor(0.5)).good
    with pytest.raises(AssertionError, match="not idempotent"):
        idempotent(lambda x: x / (x.norm() + 1e-3), ROWS)


def test_actions_return_tuples() -> None:
    row = ROWS[:1]  # which as a tuple of rows is one argument
    with pytest.raises(TypeError, match="action returned a Tensor; it must return a tuple of all"):
        invariant(torch.sin, lambda x: -x, row)
    with pytest.raises(TypeError, match="before returned a Tensor; it must return a tuple of all"):
        equivariant(torch.sin, lambda x: -x, lambda y: -y, row)
    assert equivariant(torch.sin, lambda x: [-x], lambda y: -y, row).good


# -- batches and sets -----------------------------------------------------------------------------------


def test_examples_of_a_batch_are_independent() -> None:
    assert batch_independent(lambda w, x: torch.tanh(x @ w), W, X, in_dims=[None, 0]).good
    assert batch_independent(lambda x: F.layer_norm(x, (4,)), X.mT.mT, in_dims=1, out_dim=1).good
    assert batch_independent(lambda i, w: w[i], torch.tensor([1, 0, 3]), W, in_dims=[0, None]).good
    norm = torch.nn.BatchNorm1d(4)
    with pytest.raises(AssertionError, match="depend on other examples"):
        batch_independent(norm, ROWS)
    assert not norm.running_mean.any() and batch_independent(norm.eval(), ROWS).good


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x + 1e-3 * x.sum(0),
        lambda x: x.detach() + x.mean(0) - x.mean(0).detach(),  # right in values
        lambda x: x / len(x),
        lambda x: x + torch.arange(len(x))[:, None],
    ],
)
def test_examples_that_depend_on_others_their_place_or_number(wrong: Any) -> None:
    with pytest.raises(AssertionError, match="examples of a batch depend on"):
        batch_independent(wrong, ROWS)


def test_sets_and_graphs() -> None:
    edges = torch.tensor([[0.0, 1, 0], [0, 0, 1], [1, 1, 0]])
    assert permutation_equivariant(
        lambda x, a: torch.tanh(a @ x), ROWS, edges, in_dims=[0, (0, 1)]
    ).good
    assert permutation_invariant(lambda x: x.mean(1), X, in_dims=1).good
    for wrong in (lambda x: x.cumsum(0), lambda x: x + x.roll(1, 0), lambda x: x[0] + 0 * x):
        with pytest.raises(AssertionError, match="not equivariant under permutations"):
            permutation_equivariant(wrong, torch.cat([ROWS, ROWS + 1]))
    with pytest.raises(AssertionError, match=r"not invariant under permutations, .* all are shifted"):
        permutation_invariant(
            lambda x: x[0] * x[1] * x[2:].exp().sum(0), torch.cat([ROWS, ROWS + 1])
        )


def test_dims_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"sizes are 3 .* 4"):
        batch_independent(torch.matmul, ROWS, W)
    with pytest.raises(ValueError, match="for 2 arguments"):
        batch_independent(torch.matmul, ROWS, W, in_dims=[0])
    with pytest.raises(ValueError, match=r"args\[0\] has shape \[3, 4\], and no dim 2"):
        causal(torch.sin, ROWS, in_dims=2)
    with pytest.raises(ValueError, match="at least 2"):
        causal(torch.sin, ROWS[:, :1])
    with pytest.raises(ValueError, match="a dim for each, and fn returns one result"):
        causal(torch.sin, ROWS, out_dim=[1])
    with pytest.raises(ValueError, match="leaves out all results"):
        batch_independent(lambda x: (x, x), ROWS, out_dim=[None, None])


def test_results_without_the_dim_are_named_and_left_out() -> None:
    lstm = torch.nn.LSTM(4, 2, 5, batch_first=True)  # five layers, whose states lie along dim 0
    where = r"out\[1\]\[0\] is of shape \[5, 3, 2\], without 5 positions along dim 1; out_dim is"
    with pytest.raises(ValueError, match=where):
        causal(lstm, X, orders=["value"])
    assert causal(lstm, X, out_dim=[1, None], orders=VALUES).good
    assert batch_independent(lstm, X, out_dim=[0, 1], orders=["value"]).good
    assert batch_independent(lstm, X, out_dim=[0, None], orders=["value"]).good
    leak = lambda x: (x.cumsum(1), x.sum(1) + x.sum(0, keepdim=True).sum(1))  # noqa: E731
    assert causal(leak, X, out_dim=[1, None]).good
    with pytest.raises(AssertionError, match="not causal"):
        causal(lambda x: (x.flip(1), x.sum(1)), X, out_dim=[1, None])
    with pytest.raises(AssertionError, match="depend on other examples"):
        batch_independent(leak, X)
    assert batch_independent(leak, X, out_dim=[0, None], orders=VALUES).good


# -- sequences ----------------------------------------------------------------------------------------


def test_causal_models() -> None:
    assert causal(attention, X, W, in_dims=[1, None]).good
    shifted = lambda x: F.pad(x.cumsum(1), (0, 0, 1, 0))[:, :-1]  # noqa: E731
    assert causal(shifted, X, strict=True).good
    ids = torch.arange(15).view(3, 5) % 4
    assert causal(lambda i, w: w[i].cumsum(1), ids, W, in_dims=[1, None]).good
    with pytest.raises(AssertionError, match="not causal"):
        causal(lambda i, w: w[i].flip(1), ids, W, in_dims=[1, None])
    with pytest.raises(AssertionError, match="not causal"):
        causal(lambda x, w: attention(x, w, False), X, W, in_dims=[1, None])
    with pytest.raises(AssertionError, match="not causal"):
        causal(lambda x: x.cumsum(1), X, strict=True)


@pytest.mark.parametrize("at", [0, 3, 11])
def test_one_position_that_sees_the_next(at: int) -> None:
    x = random.normal(random.key(3), (2, 13, 2))
    place = torch.arange(13)[:, None] == at
    with pytest.raises(AssertionError, match="not causal"):
        causal(lambda x: x + place * 1e-3 * x.roll(-1, 1), x)


@pytest.mark.parametrize("fill", [None, 1e30, torch.nan, torch.inf])
def test_padding_changes_nothing(fill: float | None) -> None:
    def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return masked_attention(x.where(mask[..., None], 0), mask)

    assert padding_invariant(masked, X, MASK, mask=MASK, fill=fill, orders=VALUES).good
    with pytest.raises(AssertionError, match="padding changes"):
        padding_invariant(
            lambda x: attention(x, W, False), X, lengths=LENGTHS, fill=fill, orders=VALUES
        )
    pooled = lambda x: x.sum(1)  # noqa: E731
    with pytest.raises(AssertionError, match="padding changes"):
        padding_invariant(pooled, X, mask=MASK, fill=fill, per_position=False, orders=VALUES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_places_are_those_of_the_result(dtype: torch.dtype) -> None:
    place = torch.zeros(3, 5, 4)
    place[2, 1, 3] = 1
    leak = lambda x: (x + place * x.sum(1, keepdim=True)).to(dtype)  # noqa: E731
    with pytest.raises(AssertionError, match=r"at \[2, 1, 3\]"):
        padding_invariant(leak, X.abs().round() - 1, lengths=LENGTHS, orders=["value"])


def test_zero_times_what_is_padded() -> None:
    product = lambda x, mask: (x * mask[..., None]).sum(1)  # noqa: E731
    assert padding_invariant(product, X, MASK, mask=MASK, per_position=False).good
    for fill in (torch.nan, torch.inf):
        with pytest.raises(AssertionError, match="padding changes"):
            padding_invariant(product, X, MASK, mask=MASK, per_position=False, fill=fill)
    low = lambda x, mask: (x @ x.mT - 5.0 * ~mask[:, None]).softmax(-1) @ x  # noqa: E731
    with pytest.raises(AssertionError, match="padding changes"):
        padding_invariant(low, X, MASK, mask=MASK)


def test_masks_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="nothing is padded"):
        padding_invariant(torch.sin, X, lengths=torch.tensor([5, 5, 5]))
    with pytest.raises(ValueError, match="either mask or lengths"):
        padding_invariant(torch.sin, X)
    with pytest.raises(ValueError, match="booleans of x's leading dims"):
        padding_invariant(torch.sin, X, mask=MASK[:2])
    with pytest.raises(ValueError, match="per_position=False"):
        padding_invariant(lambda x: x.sum(1), X, mask=MASK)


# -- order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn", [torch.sigmoid, F.softplus, torch.relu, lambda x: x.cumsum(0), torch.erf]
)
def test_monotone_functions(fn: Any) -> None:
    monotone(fn, ROWS)
    monotone(lambda x: -fn(x), ROWS, increasing=False)
    with pytest.raises(AssertionError, match="not increasing"):
        monotone(lambda x: -fn(x), ROWS)


@pytest.mark.parametrize("fn", [F.gelu, torch.sin, lambda x: x - 1e-2 * x.roll(1, 0), torch.square])
def test_functions_that_are_not_monotone(fn: Any) -> None:
    with pytest.raises(AssertionError, match="not increasing: out"):
        monotone(fn, ROWS)


def test_roundings_may_make_results_smaller() -> None:
    x = random.normal(random.key(4), (16,)).abs()

    def square(x: torch.Tensor) -> torch.Tensor:
        return (x + 1e4).square() - 1e8 - 2e4 * x  # in float32, off by some units

    monotone(square, x, draws=1)
    with pytest.raises(AssertionError, match="not increasing"):
        monotone(lambda x: -square(x.double()), x, draws=1)


def test_one_term_that_falls() -> None:
    x = random.normal(random.key(5), (2000,))
    weights = torch.ones(2000)
    weights[1234] = -1e-3
    monotone(lambda x: (x * weights.abs()).sum(), x)
    with pytest.raises(AssertionError, match="not increasing: out falls"):
        monotone(lambda x: (x * weights).sum(), x)
    with pytest.raises(AssertionError, match="not decreasing: out rises"):
        monotone(lambda x: (x * -weights).sum(), x, increasing=False)
    branches = lambda x: x[x > 0].sum() + (x * weights).detach().sum()  # noqa: E731
    monotone(branches, x.abs())  # without a gradient of what falls, it may not be found


def test_draws_are_the_same_in_each_call_of_a_law() -> None:
    for fn in (torch.nn.Dropout(0.5), functools.partial(F.dropout, p=0.5)):
        monotone(fn, ROWS)
    monotone(torch.dropout, ROWS, 0.5, True)


# -- ties ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sort(0).values * torch.arange(3.0)[:, None],
        lambda x: x.topk(2, 0).values,
        lambda x: x.max(0).values,
        lambda x: x.abs().median(0).values,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sort_chooses_among_ties(fn: Any, dtype: torch.dtype) -> None:
    ties = torch.tensor([[1.0, 2.0, 0.0], [-1.0, 2.0, 0.0], [1.0, 1.0, 0.0]], dtype=dtype)
    assert permutation_invariant(lambda x: fn(x.float()), ties).good
    assert invariant(lambda x: fn(x.float()), lambda x: (x.flip(0),), ties).good
    with pytest.raises(AssertionError, match="not invariant"):
        permutation_invariant(lambda x: fn(x.float()) + x[0], ties)
    wrong = lambda x: fn(x.float()) + x[0] * 2 - (x[0] * 2).detach()  # noqa: E731  # in gradients alone
    with pytest.raises(AssertionError, match="not invariant"):
        permutation_invariant(wrong, ties)
