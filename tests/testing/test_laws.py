"""Laws hold for what is right, and say what is wrong with what is not."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from any_size import fuse
from effort import cases
from torch.nn import functional as F

from torchard import Mesh, P, checkpoint, jit, policies, random, shard
from torchard.testing import (
    assert_collectives,
    assert_kernels,
    assert_residual_bytes,
    check_batching,
    check_checkpoint,
    check_derivatives,
    check_dtypes,
    check_pure,
    check_sharding,
    check_stack,
    equal,
    equivariant,
    homogeneous,
    invariant,
    max_traces,
)
from torchard.testing.strategies.layouts import LAYOUTS, laid_out

X = random.normal(random.key(0), (4, 6), dtype=torch.float64)
W = random.normal(random.key(1), (6, 3), dtype=torch.float64)
TP = Mesh({"tp": 2}, virtual=True)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


class WrongBackward(torch.autograd.Function):
    """x ** 2 with a derivative of x instead of 2 x, in each mode as asked."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, mode: str) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.mode = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.saved_tensors[0] * (1 if ctx.mode == "reverse" else 2), None

    @staticmethod
    def jvp(ctx: Any, t: torch.Tensor, _: Any) -> torch.Tensor:
        return t * ctx.saved_tensors[0] * (1 if ctx.mode == "forward" else 2)


# -- equal --------------------------------------------------------------------------------------------


def test_results_that_are_no_tensors_and_structures_are_compared() -> None:
    with pytest.raises(AssertionError, match="reference 4"):
        equal(lambda x: (x, 3), lambda x: (x, 4), X)
    with pytest.raises(AssertionError, match="fn has no such result"):
        equal(lambda x: {"a": x}, lambda x: {"a": x, "b": x}, X)
    with pytest.raises(AssertionError, match="shape"):
        equal(lambda x: x.sum(0), lambda x: x.sum(1), X)
    with pytest.raises(AssertionError, match="dtype, reference"):
        equal(lambda x: x.float(), lambda x: x, X)


@pytest.mark.parametrize("order", ["gradient", "jvp", "second"])
def test_derivatives_alone_may_differ(order: str) -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        return x * x + (x - x.detach())

    def much_other(x: torch.Tensor) -> torch.Tensor:
        return x * x + (x - x.detach()) ** 2

    wrong = much_other if order == "second" else other
    equal(wrong, lambda x: x * x, X, orders=["value"])
    with pytest.raises(AssertionError, match="differs"):
        equal(wrong, lambda x: x * x, X, orders=[order])


def test_nans_and_infinities_agree_where_they_are_equal() -> None:
    x = torch.tensor([1.0, 0.0, -1.0])
    equal(lambda x: x.log(), lambda x: x.log(), x, orders=["value"])
    with pytest.raises(AssertionError, match="differs"):
        equal(lambda x: x.log().nan_to_num(), lambda x: x.log(), x, orders=["value"])


# -- derivatives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [layer, lambda x, w: F.relu(x @ w), lambda x, w: (x @ w).logsumexp(0)])
def test_derivatives_of_right_functions(fn: Any) -> None:
    check_derivatives(fn, X, W)


@pytest.mark.parametrize("fn", [torch.relu, torch.abs, lambda x: x.clamp(-1, 0), F.hardswish])
def test_derivatives_at_kinks_lie_between_the_sides(fn: Any) -> None:
    check_derivatives(fn, torch.tensor([0.0, -1.0, 1.0]), order=1)


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_a_wrong_derivative_of_one_mode(mode: str) -> None:
    with pytest.raises(AssertionError, match="of order 1 is wrong"):
        check_derivatives(lambda x: WrongBackward.apply(x, mode), X)
    with pytest.raises(AssertionError, match=f"{mode} mode of order 1 is wrong"):
        check_derivatives(lambda x: WrongBackward.apply(x, mode), X, modes=[mode])


def test_a_wrong_second_derivative() -> None:
    def first_only(x: torch.Tensor) -> torch.Tensor:
        return (x * x.detach() * 2 - x.detach() ** 2).sum()  # x ** 2, its gradient 2 x taken as constant

    check_derivatives(first_only, X, order=1, modes=["forward"])
    with pytest.raises(AssertionError, match="of order 2 is wrong"):
        check_derivatives(first_only, X, order=2)


# -- purity, batches, dtypes ----------------------------------------------------------------------------


def test_impure_functions_are_named() -> None:
    seen: list[int] = []

    def counts(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return x + len(seen)

    with pytest.raises(AssertionError, match="the call changes seen"):
        check_pure(counts, X)
    with pytest.raises(AssertionError, match=r"args\[0\] was changed"):
        check_pure(lambda x: x.mul_(2), X.clone())
    with pytest.raises(AssertionError, match="global random state"):
        check_pure(torch.rand_like, X)
    check_pure(layer, X, W)


def test_vmap_is_a_loop() -> None:
    assert check_batching(layer, X, W).good
    with pytest.raises(AssertionError, match="differs"):
        check_batching(lambda x: x - x.mean() if x.ndim == 1 and not _batched(x) else x, X[0])


def _batched(x: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(x))


def test_dtypes() -> None:
    assert check_dtypes(layer, X, W).good
    with pytest.raises(AssertionError, match=r"in .*bfloat16"):
        check_dtypes(lambda x: x + (x.dtype == torch.bfloat16), X)


def test_narrower_sums_are_wrong_where_they_are_not_allowed() -> None:
    x = random.normal(random.key(2), (100,))

    def in_half(x: torch.Tensor) -> torch.Tensor:
        return x.half().square().sum().to(x.dtype)

    def in_float32(x: torch.Tensor) -> torch.Tensor:
        return x.float().square().sum().to(x.dtype)

    assert equal(in_half, in_float32, x).good
    assert check_dtypes(in_half, x).good
    with pytest.raises(AssertionError, match="differs"):
        equal(in_half, in_float32, x, allow_narrower=False)
    with pytest.raises(AssertionError, match=r"in torch\.float32"):
        check_dtypes(in_half, x, dtypes=[torch.bfloat16, torch.float32], allow_narrower=False)
    assert check_dtypes(
        in_float32, x, dtypes=[torch.bfloat16, torch.float32], allow_narrower=False
    ).good


# -- transforms ---------------------------------------------------------------------------------------


def test_transforms() -> None:
    assert check_sharding(layer, TP, (P(None, "tp"), P("tp")), X, W).good
    assert check_checkpoint(layer, [policies.save_nothing, policies.save_dots], X, W).good
    words = [("grad", "shard"), ("vmap", "jit", "checkpoint"), ("jvp", "fuse")]
    assert check_stack(layer, words, X, W).good
    with pytest.raises(AssertionError, match=r"the stack jit of <lambda>"):
        check_stack(layer, [(lambda fn: lambda *a: 2 * fn(*a), "jit")], X, W)
    with pytest.raises(ValueError, match="'pmap' is not a layer of a stack"):
        check_stack(layer, [("pmap",)], X, W)


def test_symmetries() -> None:
    assert invariant(lambda x: x.softmax(0), lambda x: (x + 1,), X).good
    assert equivariant(layer, lambda x, w: (x.flip(0), w), lambda y: y.flip(0), X, W).good
    assert homogeneous(lambda x: x.relu() @ x.mT.relu(), 2, X).good
    with pytest.raises(AssertionError, match="differs"):
        invariant(torch.tanh, lambda x: (x + 1,), X)
    with pytest.raises(AssertionError, match="differs"):
        equivariant(lambda x: x.cumsum(0), lambda x: (x.flip(0),), lambda y: y.flip(0), X)
    with pytest.raises(AssertionError, match="differs"):
        homogeneous(lambda x: x + 1, 1, X)


# -- costs --------------------------------------------------------------------------------------------


def test_costs() -> None:
    sharded = shard(lambda x, w: x @ w, TP, (P(None, "tp"), P("tp")), P())
    assert_collectives(sharded, X, W, all_reduce=1, bytes=4 * 3 * 8)
    with pytest.raises(AssertionError, match="all_reduce=1, not none"):
        assert_collectives(sharded, X, W)
    with pytest.raises(AssertionError, match="a rank sends 96 bytes, not 5"):
        assert_collectives(sharded, X, W, all_reduce=1, bytes=5)
    deep = checkpoint(lambda x: x.sin().exp().sin().sum())
    assert_residual_bytes(deep, X, most=0)
    with pytest.raises(AssertionError, match="bytes are saved, more than 0"):
        assert_residual_bytes(lambda x: x.sin().exp().sin().sum(), X, most=0)
    fused = fuse(lambda x, b: F.gelu(x + b, approximate="tanh"))
    assert_kernels(fused, X, X[0], bias_gelu_tanh=1)
    with pytest.raises(AssertionError, match="uses bias_gelu_tanh=1, not none"):
        assert_kernels(fused, X, X[0])


def test_traces() -> None:
    f = jit(torch.sin, backend="eager")
    with max_traces(1, f):
        f(X), f(2 * X)
    with pytest.raises(AssertionError, match="traced 2 times, more than 1"), max_traces(1, f):
        f(X[0]), f(X[:2])


# -- layouts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", cases(["expanded"], [name for name in LAYOUTS if name != "expanded"])
)
def test_laws_take_arguments_of_any_layout(layout: str) -> None:
    x = laid_out(torch.arange(6, dtype=torch.float64).view(3, 2) / 8, layout, Random(0))
    equal(torch.sin, torch.sin, x)
    check_derivatives(torch.sin, x)
    check_pure(torch.sin, x)
    check_batching(torch.sin, x)
    check_dtypes(torch.sin, x)
    check_sharding(torch.sin, TP, P("tp"), x)
    check_checkpoint(torch.sin, [policies.save_nothing], x)
    check_stack(torch.sin, [("jit", "grad")], x)
