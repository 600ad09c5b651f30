"""What a function does besides returning a value cannot make a wrong one pass, nor a right one fail."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchard.functional.core.errors import PurityError
from torchard.testing import (
    Differs,
    batch_independent,
    causal,
    check_derivatives,
    check_pure,
    check_training,
    equal,
    homogeneous,
    idempotent,
    invariant,
    inverse,
    monotone,
    padding_invariant,
    permutation_equivariant,
)

X = torch.linspace(1, 2, 3)
VALUE: dict[str, Any] = {"orders": ("value",)}


def tripled(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    torch._foreach_mul_([y], 3.0)  # returns nothing
    return y


def through_numpy(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.detach().numpy()[0] = 5
    return y


def test_operations_that_only_write_are_recorded() -> None:
    assert equal(tripled, tripled, X).good
    with pytest.raises(Differs):
        equal(torch.clone, tripled, X, **VALUE)


def test_what_operators_do_not_write_is_refused() -> None:
    with pytest.raises(PurityError, match="something else writes"):
        equal(torch.clone, through_numpy, X, **VALUE)


def test_arrays_of_numpy_are_compared_as_tensors_are() -> None:
    def by_numpy(x: torch.Tensor) -> Any:
        return np.exp(x.numpy())

    assert equal(by_numpy, torch.exp, X, **VALUE).good
    assert equal(torch.exp, by_numpy, X, **VALUE).good
    with pytest.raises(Differs, match="times its bound"):
        equal(lambda x: by_numpy(x) + np.float32(1e-4), torch.exp, X, **VALUE)


def test_numbers_and_views_of_numpy_are_compared_too() -> None:
    assert equal(lambda x: x.numpy().mean(), torch.mean, X, **VALUE).good
    assert equal(torch.mean, lambda x: x.numpy().mean(), X, **VALUE).good
    assert equal(lambda x: np.exp(x.numpy())[::-1], lambda x: x.exp().flip(0), X, **VALUE).good
    names = np.array(["a"])
    assert equal(lambda x: (x, names), lambda x: (x, names), X, **VALUE).good
    with pytest.raises(Differs, match="where nothing is rounded"):
        equal(lambda x: x.numpy().mean() + 1e-3, torch.mean, X, **VALUE)


def test_derivatives_of_arrays_are_left_out_and_said() -> None:
    report = equal(lambda x: np.exp(x.numpy()), torch.exp, X)
    assert [bool(row.skipped) for row in report] == [False, True, True, True]
    assert equal(lambda x: np.exp(x.detach().numpy()), torch.exp, X)[1].skipped


def test_laws_see_arrays_of_numpy() -> None:
    x = torch.tensor([[0.3, -2.0], [1.2, 0.5], [-0.7, 3.0]])
    with pytest.raises(AssertionError, match="not increasing"):
        monotone(lambda x: -np.exp(x.numpy()), x)
    monotone(lambda x: np.exp(x.numpy()), x)
    assert causal(lambda x: x.numpy().cumsum(1), x)[0].good
    assert permutation_equivariant(lambda x: np.exp(x.numpy()), x).good
    assert batch_independent(lambda x: np.exp(x.numpy()), x).good
    assert homogeneous(lambda x: x.numpy() * 2, 1, x).good
    assert inverse(lambda x: 2 * x.numpy(), lambda y: torch.from_numpy(y / 2), x, **VALUE).good


def test_numbers_must_be_the_same() -> None:
    assert equal(lambda x: math.nan, lambda x: math.nan, X, **VALUE).good
    with pytest.raises(Differs, match="numbers must be the same"):
        equal(lambda x: 0.1, lambda x: 0.2, X, **VALUE)


def test_no_result_differs_from_a_tensor() -> None:
    with pytest.raises(Differs, match="a NoneType, reference a tensor"):
        equal(lambda x: None, torch.exp, X)


def test_bits_are_those_of_the_own_precision() -> None:
    def magnitude(x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)

    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int32)

    x = torch.tensor([0.1, -2.0, 3.0])
    assert equal(lambda x: x.mul(1.1).abs(), lambda x: magnitude(x * 1.1), x, **VALUE).good
    assert equal(bits, bits, x, **VALUE).good
    with pytest.raises(Differs):
        equal(lambda x: bits(x) + 1, bits, x, **VALUE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_that_modules_update_are_compared(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    right, wrong = (nn.BatchNorm1d(3, momentum=m).to(dtype) for m in (0.1, 0.2))
    assert equal(nn.BatchNorm1d(3).to(dtype), right, x).good
    with pytest.raises(Differs, match=r"buffer running_mean .* <--"):
        equal(wrong, right, x)
    assert equal(wrong.eval(), right.eval(), x).good
    assert right.num_batches_tracked == 0


def test_sparse_tensors_are_refused_by_name() -> None:
    with pytest.raises(PurityError, match="sparse"):
        equal(torch.clone, lambda x: x.to_sparse().to_dense(), X, **VALUE)


@pytest.mark.parametrize(
    "check",
    [
        lambda x: equal(lambda x: x.zero_(), lambda x: x * 5, x, **VALUE),
        lambda x: inverse(lambda x: x.mul_(3), lambda y: y.div_(5), x, **VALUE),
        lambda x: idempotent(lambda x: x.add_(1), x, **VALUE),
    ],
)
def test_arguments_that_are_written_are_told(check: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError, match=r"changes args\[0\] in place"):
        check(X.clone())


def test_results_in_one_buffer_are_compared_as_they_were() -> None:
    buffer = torch.empty(3)

    def into(k: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.mul(x, k, out=buffer)

    for check in (
        lambda: equal(into(2.0), into(3.0), X, **VALUE),
        lambda: idempotent(into(2.0), X, **VALUE),
        lambda: invariant(into(2.0), lambda x: (x + 1,), X, **VALUE),
    ):
        with pytest.raises(Differs):
            check()


def test_signs_zeros_and_masks_are_changed_too() -> None:
    rows = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    padded, lengths = torch.tensor([[1.0, 2, 0, 0], [1, 3, 4, 0]]), torch.tensor([2, 3])
    assert causal(lambda x: x.cumsum(1), rows).good
    for check in (
        lambda: causal(lambda x: x * (x > 0).sum(1, keepdim=True), rows),
        lambda: causal(lambda x, m: x * m.all(1, keepdim=True), rows, torch.ones(2, 5).bool()),
        lambda: padding_invariant(
            lambda x: x.abs().sum(1), padded, lengths=lengths, per_position=False
        ),
    ):
        with pytest.raises(Differs):
            check()


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (lambda x: x.unsqueeze_(0), r"args\[0\] was changed"),
        (lambda x: torch.manual_seed(0) and x * 1, "global random state"),
        (lambda x: x * np.random.rand() ** 0, "NumPy's random"),
        (lambda x: x * random.random() ** 0, "Python's random"),
        (lambda x: (torch.set_grad_enabled(False), x * 1)[1], "grad mode"),
    ],
)
def test_effects_on_everybody_are_seen(fn: Callable[..., Any], what: str) -> None:
    with pytest.raises(AssertionError, match=what), torch.random.fork_rng(), torch.enable_grad():
        check_pure(fn, X.clone())


def test_values_of_arrays_and_generators_of_an_object_are_seen() -> None:
    held: dict[str, Any] = {"array": np.zeros(2), "bytes": bytearray(2), "draws": random.Random(0)}
    draws = np.random.default_rng(0)

    def adds(x: torch.Tensor, to: str) -> torch.Tensor:
        held[to][0] += 1
        return x

    with pytest.raises(AssertionError, match="values of an array"):
        check_pure(lambda x: adds(x, "array"), X)
    with pytest.raises(AssertionError, match="changes held"):
        check_pure(lambda x: adds(x, "bytes"), X)
    with pytest.raises(AssertionError, match="state of a random generator"):
        check_pure(lambda x: (held["draws"].random(), x)[1], X)
    with pytest.raises(AssertionError, match="state of a random generator"):
        check_pure(lambda x: (draws.random(), x)[1], X)


def test_gradients_of_arguments_are_theirs() -> None:
    with pytest.raises(AssertionError, match=r"args\[0\].requires_grad was changed"):
        check_pure(lambda x: x.requires_grad_(), X.clone())
    with pytest.raises(AssertionError, match=r"args\[0\].grad was changed"):
        check_pure(lambda x: (x.sum().backward(), x)[1], X.clone().requires_grad_())


def test_results_of_a_pure_function_may_be_arrays() -> None:
    assert not check_pure(lambda x: {"a": x.numpy() * 2, "names": np.array(["a"])}, X).traceable
    with pytest.raises(AssertionError, match="differs between two calls"):
        check_pure(lambda x: np.array([random.SystemRandom().random()]), X)


def test_leaves_that_are_added_to_an_argument_are_seen() -> None:
    with pytest.raises(AssertionError, match="other leaves"):
        check_pure(lambda d: (d.update(b=1), d["a"])[1], {"a": X})


class TwiceTheWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.T, 2 * x.T @ g


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return TwiceTheWeight.apply(x, self.w)


def test_parameters_of_a_module_are_differentiated() -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    norm = nn.BatchNorm1d(4)
    check_derivatives(norm, x)
    assert int(norm.num_batches_tracked) == 0
    with pytest.raises(AssertionError, match="reverse mode of order 1 is wrong"):
        check_derivatives(Layer(), x)


def test_parameters_keep_their_gradients() -> None:
    linear = nn.Linear(3, 2)
    w, b = linear.weight.detach(), linear.bias.detach()
    equal(linear, lambda x: x @ w.T + b, X, orders=("backward",))
    assert linear.weight.grad is None


def test_a_loss_that_writes_to_parameters_is_told() -> None:
    params = {"w": torch.ones(3)}

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        params["w"].data.mul_(0.5)
        return (params["w"] * x).square().sum()

    with pytest.raises(AssertionError, match=r"params\['w'\] was changed by the loss"):
        check_training(loss, params, X)


def test_confident_logits_are_no_alarm() -> None:
    for seed in range(5):
        logits = 100 * torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))

        def loss(x: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x, torch.tensor([1, 0, 3, 2]))

        assert equal(loss, loss, logits).good


def test_waves_of_many_periods() -> None:
    for seed in (12, 3, 4, 5):
        x = torch.randn((4, 6), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        check_derivatives(torch.sin, x * 1000, order=1)


@pytest.mark.parametrize("scale", [1.0, 0.0, -2.0])
def test_scales_that_say_nothing_are_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="positive number other than 1"):
        homogeneous(torch.exp, 1, X, scale=scale)
