"""What is fused lies in memory as a user may rely on, and nothing is shared that was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor

from torchard.functional.core.bounded import Recent
from torchard.functional.core.outputs import outputs_of
from torchard.kernels import KERNELS
from torchard.kernels.execution import autotune as choice
from torchard.kernels.execution import buffers
from torchard.kernels.execution.pool import Pool

DRAW = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DRAW, dtype=torch.float64)


X3, WEIGHTS = draw(2, 4, 6), [draw(6, 6) for _ in range(3)]
X, Y, W, B = draw(40, 6), draw(40, 6), draw(6), draw(6)


def heads(t: Tensor) -> Tensor:
    return t.view(2, 4, 2, 3).transpose(1, 2)


def attention(x: Tensor, *weights: Tensor) -> Tensor:
    q, k, v = (heads(x @ w) for w in weights)
    return (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).square().sum()


def linear_in_q(x: Tensor, *weights: Tensor) -> Tensor:
    q, k, v = (heads(x @ w) for w in weights)
    return (q @ k.transpose(-1, -2) @ v).square().sum()


@pytest.mark.parametrize("fn", [attention, linear_in_q])
def test_gradients_of_products_side_by_side_can_be_viewed(fn: Callable[..., Tensor]) -> None:
    every = (0, 1, 2, 3)
    expected = torch.func.grad(fn, every)(X3, *WEIGHTS)
    for fused in (fuse(torch.func.grad(fn, every)), torch.func.grad(fuse(fn), every)):
        torch.testing.assert_close(fused(X3, *WEIGHTS), expected)
    given = [t.clone().requires_grad_() for t in (X3, *WEIGHTS)]
    torch.testing.assert_close(torch.autograd.grad(fuse(fn)(*given), given), expected)


def projected(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(x @ w for w in weights)


def test_products_that_are_returned_are_each_their_own() -> None:
    weights = [w.requires_grad_() for w in (draw(6, 5), draw(6, 5), draw(6, 5))]
    fused = fuse(projected)
    assert [str(use) for use in fused.lower(X, *weights).kernels] == ["qkv"]
    a, b, c = fused(X.clone().requires_grad_(), *weights)
    for got, want in zip((a, b, c), projected(X, *weights), strict=True):
        assert got.is_contiguous() and got._base is None
        torch.testing.assert_close(got, want)
    kept = b.detach().clone()
    a.mul_(2)
    assert torch.equal(b, kept) and a.view(-1).numel() == 200


def test_a_kernel_keeps_its_properties_under_a_pattern_of_the_user() -> None:
    """Among them that its results are parts of one buffer, which are apart where they were apart."""

    def up(x: Tensor, wg: Tensor, wu: Tensor) -> tuple[Tensor, ...]:
        return x @ wg, x @ wu

    fused = fuse(up, up, KERNELS["gate_up"], compiler="eager")
    assert [str(use) for use in fused.lower(X, *WEIGHTS[:2]).kernels] == ["gate_up"]
    results = fused(X, *WEIGHTS[:2])
    torch.testing.assert_close(results, up(X, *WEIGHTS[:2]))
    assert len({t.untyped_storage().data_ptr() for t in results}) == len(results)


SPELLED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]] = {
    "the same twice": lambda x, y: (torch.softmax(x, -1), torch.softmax(x, -1)),
    "one of them viewed": lambda x, y: (
        torch.softmax(x.exp() / x.exp().sum(), -1),
        torch.softmax(x.exp() / x.exp().sum(), -1).view(-1),
    ),
    "a sum before and behind": lambda x, y: (x + y, F.layer_norm(x + y, (6,), W, B), x + y),
}


@pytest.mark.parametrize("spelled", SPELLED)
def test_what_was_returned_apart_is_apart(
    spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "LARGE", 1)
    monkeypatch.setattr(buffers, "_pool", Pool(1 << 20))
    fn = SPELLED[spelled]
    assert fuse(fn).lower(X, Y).kernels
    results = fuse(fn)(X, Y)
    torch.testing.assert_close(results, fn(X, Y))
    assert len({t.untyped_storage().data_ptr() for t in results}) == len(results)
    first = results[0].clone()
    results[-1].zero_()
    assert torch.equal(results[0], first)


def test_what_was_one_is_one() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.softmax(x.exp() * 2 / x.exp().sum(), -1)
        return s, s.view(-1)

    s, flat = fuse(fn)(X)
    assert s.data_ptr() == flat.data_ptr()


ADDRESSED: dict[str, Callable[[Tensor], Tensor]] = {
    "as_strided": lambda y: y.as_strided((240,), (1,)),
    "as_strided_copy": lambda y: torch.as_strided_copy(y, (240,), (1,)),
    "as_strided_scatter": lambda y: torch.as_strided_scatter(y, torch.zeros(20), (20,), (3,), 1),
    "of a transposed value": lambda y: torch.as_strided_copy(y.mT, (240,), (1,)),
    "of some rows": lambda y: torch.as_strided_copy(y[2:4], (3, 2), (2, 5)),
    "of a view": lambda y: torch.as_strided_copy(y.view(-1), (3, 2), (2, 5)),
    "of an operation": lambda y: torch.as_strided_copy(y.sin(), (3, 2), (2, 5)),
    "twice": lambda y: torch.as_strided_copy(y, (3,), (2,)) * torch.as_strided_copy(y.mT, (3,), (5,)),
}


@pytest.mark.parametrize("way", ADDRESSED)
def test_who_addresses_memory_finds_it_as_it_was(way: str) -> None:
    def fn(x: Tensor, *weights: Tensor) -> Any:
        a, b, c = (x @ w for w in weights)
        return ADDRESSED[way](b), a, c

    fused = fuse(fn)
    assert fused.lower(X, *WEIGHTS).kernels
    torch.testing.assert_close(fused(X, *WEIGHTS), fn(X, *WEIGHTS))


def test_other_default_devices_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LARGE", 1)
    monkeypatch.setattr(buffers, "_pool", Pool(1 << 20))
    monkeypatch.setattr(choice, "_CHOSEN", Recent(512))
    fused = fuse(lambda x: torch.softmax(x, -1))
    for _ in range(2):
        with torch.device("meta"):
            torch.testing.assert_close(fused(X), torch.softmax(X, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_a_label_that_counts_the_gradient_is_zero(dtype: torch.dtype) -> None:
    logits, w, labels = X.to(dtype), WEIGHTS[0].to(dtype), torch.full((40,), -100)
    for fn, args in (
        (lambda x: F.cross_entropy(x, labels), (logits,)),
        (lambda x, w: F.cross_entropy(x @ w, labels), (logits, w)),
    ):
        every = tuple(range(len(args)))
        for step in (torch.func.grad(fn, every), torch.func.grad_and_value(fn, every)):
            found = fuse(step)(*args)
            torch.testing.assert_close(found, step(*args), equal_nan=True)


def test_pairs_of_a_value_are_read_from_the_whole_of_it() -> None:
    """In the second layer only halves of the first one's result have nodes of their own."""
    cos, sin, x = draw(2, 1), draw(2, 1), draw(1, 2, 2)
    weights = [draw(2, 2) for _ in range(3)]

    def rotated(q: Tensor) -> Tensor:
        a, b = q.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    def layer(x: Tensor, weights: list[Tensor]) -> Tensor:
        q, k, v = ((x @ w).reshape(1, 2, 1, 2).transpose(1, 2) for w in weights)
        scores = torch.softmax(rotated(q) @ rotated(k).mT, -1)
        return (scores @ v).transpose(1, 2).reshape(1, 2, 2)

    gradient = torch.func.grad(lambda weights: layer(layer(x, weights), weights).sum())
    torch.testing.assert_close(fuse(gradient)(weights), gradient(weights))


@pytest.mark.parametrize("layout", ["x", "cotangent"])
def test_gradients_of_group_norm_with_channels_last(layout: str) -> None:
    plain, strided = draw(2, 4, 3, 3), draw(2, 4, 3, 3).to(memory_format=torch.channels_last)
    x, c = strided if layout == "x" else plain, strided if layout == "cotangent" else plain
    w, b = draw(4), draw(4)
    gradient = torch.func.grad(
        lambda *args: (F.group_norm(args[0], 2, *args[1:]) * c).sum(), (0, 1, 2)
    )
    fused = fuse(gradient)
    assert [use.kernel for use in fused.lower(x, w, b).kernels] == ["group_norm_backward"]
    torch.testing.assert_close(fused(x, w, b), gradient(x, w, b))


def test_the_gradient_of_group_norm_reads_weights_by_their_strides() -> None:
    """torch copies the weight that it is given; a program that is written out need not."""
    run = KERNELS["group_norm"].vjp["any"]  # type: ignore[index]
    x, w, rest = draw(2, 2, 2, 9), draw(1, 2, 4, 1)[:, :, ::2], (draw(2, 2), draw(2, 2), draw(2, 2, 2, 9))
    for a, b in zip(run(x, w, *rest), run(x, w.contiguous(), *rest), strict=True):  # type: ignore[operator]
        torch.testing.assert_close(a, b)


def test_what_was_rounded_is_not_read_before_it_where_torch_refuses_mixed_dtypes() -> None:
    x, v = draw(3, 4).bfloat16(), draw(4, 5).bfloat16()
    w, b = draw(4).bfloat16(), draw(4).bfloat16()

    def weighted(x: Tensor, v: Tensor) -> Tensor:
        return (torch.softmax(x, -1, dtype=torch.float32).to(x.dtype) @ v).float().sum()

    def normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (4,), w.float(), b.float()).to(x.dtype).float().sum()

    for fn, args in ((weighted, (x, v)), (normed, (x, w, b))):
        gradient = torch.func.grad(fn, tuple(range(len(args))))
        fused = fuse(gradient)
        assert fused.lower(*args).kernels
        torch.testing.assert_close(fused(*args), gradient(*args))


def test_what_a_kernel_returns_of_its_arguments_is_copied() -> None:
    def one(x: Tensor) -> Tensor:
        return torch.relu(x) + torch.relu(-x)

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        return one(x), (3 * x).sin()

    x = draw(4).abs()
    for fn, kernel in (
        (one, lambda x: x),
        (one, lambda x: x.view(x.shape)),
        (two, lambda x: (x, (3 * x).sin())),
    ):
        run = fuse(fn, fn, kernel)
        for _ in range(2):
            found, before = outputs_of(run(x)), x.clone()
            for a, b in zip(found, outputs_of(fn(x)), strict=True):
                torch.testing.assert_close(a, b)
            found[0].mul_(5)
            assert torch.equal(x, before)
