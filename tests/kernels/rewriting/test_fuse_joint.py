"""A loss and its gradients by one kernel, where nothing has to wait for the loss."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_size import fuse
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from torchard import Mesh, P, checkpoint, policies, shard
from torchard.functional.trace import trace
from torchard.kernels.rewriting import fused_loss_grad as joint

N, D, V = 11, 6, 9


def logits_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def linear_loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ w, labels)


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(V, (N,), generator=draw)
    labels[3] = -100  # does not count
    values = [torch.randn(shape, generator=draw) for shape in ((N, D), (D, V))]
    return values[0].to(dtype), values[1].to(dtype), labels


def kernels(fn: Callable[..., Any], *args: Any) -> list[str]:
    return [str(use) for use in fuse(fn).lower(*args).kernels]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chunk", [1, 3 * V, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_kernel_gives_both(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = (sys.modules[f"torchard.kernels.library.{n}cross_entropy"] for n in ("", "linear_"))
    for module, limit in zip(modules, ("_CHUNK", "_ELEMENTS"), strict=True):
        monkeypatch.setattr(module, limit, chunk)
    x, w, labels = drawn(dtype)
    exact = (x.double(), w.double(), labels)
    for fn, argnums, args, wide in (
        (linear_loss, (0, 1), (x, w, labels), exact),
        (logits_loss, (0,), ((x @ w), labels), ((x @ w).double(), labels)),
    ):
        both = grad_and_value(fn, argnums)
        assert kernels(both, *args)[0].endswith("cross_entropy_with_backward")
        assert len(kernels(both, *args)) == 1
        found, expected = fuse(both)(*args), grad_and_value(fn, argnums)(*wide)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, check_dtype=False
        )
        assert all(g.dtype == dtype for g in found[0]) and found[1].dtype == dtype


@pytest.mark.parametrize("fn, argnums", [(linear_loss, (0, 1)), (logits_loss, 0)])
def test_the_loss_and_gradient_of_different_labels_stay_apart(
    fn: Callable[..., Tensor], argnums: Any
) -> None:
    x, w, labels = drawn()
    args = (x, w) if fn is linear_loss else (x @ w,)

    def step(*args: Tensor) -> Any:
        return fn(*args), grad(lambda *given: fn(*given, labels.flip(0)), argnums)(*args[:-1])

    torch.testing.assert_close(fuse(step)(*args, labels), step(*args, labels))


def scaled(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return linear_loss(x, w, labels) / 4


def test_a_scaled_loss_need_not_wait_either() -> None:
    args = drawn()
    step = grad_and_value(scaled, (0, 1))
    assert kernels(step, *args) == ["linear_cross_entropy_with_backward"]
    torch.testing.assert_close(fuse(step)(*args), step(*args))


def perplexity(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return linear_loss(x, w, labels).exp()


def test_a_cotangent_that_depends_on_the_loss_waits_for_it() -> None:
    args = drawn()
    step = grad_and_value(perplexity, (0, 1))
    assert kernels(step, *args) == ["linear_cross_entropy", "linear_cross_entropy_backward"]
    torch.testing.assert_close(fuse(step)(*args), step(*args))


def test_some_of_the_gradients_are_a_kernel_of_their_own() -> None:
    args = drawn()
    step = grad_and_value(linear_loss, 0)
    assert kernels(step, *args) == ["linear_cross_entropy", "linear_cross_entropy_backward"]
    torch.testing.assert_close(fuse(step)(*args), step(*args))


def test_a_program_that_is_split_has_two() -> None:
    """A cotangent that comes from outside is not there yet when the loss is asked for."""
    x, w, labels = drawn()
    fused = fuse(linear_loss)
    given = [x.requires_grad_(), w.requires_grad_()]
    found = torch.autograd.grad(fused(x, w, labels) * 3, given)
    expected = torch.autograd.grad(linear_loss(x, w, labels) * 3, given)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("outer", [0, 1, 2])
def test_with_derivatives_and_batches_outside(outer: int) -> None:
    x, w, labels = drawn()

    def steep(x: Tensor) -> Tensor:
        slopes = grad(linear_loss, (0, 1))(x, w, labels)
        return (slopes[0] ** 2).sum() + slopes[1].sin().sum()

    makers: list[Callable[[Any], Any]] = [
        lambda f: grad(lambda x: f(grad_and_value(steep))(x)[1])(x),
        lambda f: f(vmap(lambda x: grad_and_value(linear_loss, (0, 1))(x, w, labels)))(
            torch.stack([x, 2 * x])
        ),
        lambda f: grad(lambda x: f(scaled)(x, w, labels))(x),
    ]
    make = makers[outer]
    torch.testing.assert_close(make(fuse), make(lambda f: f))


@pytest.mark.parametrize("rows", [None, "dp"])
def test_over_a_mesh(rows: str | None) -> None:
    args = drawn()
    step = grad_and_value(linear_loss, (0, 1))
    mesh = Mesh({"dp": 2}, virtual=True)
    specs = (P(rows), P(), P(rows))
    for stack in (
        shard(fuse(step), mesh, in_specs=specs, out_specs=P()),
        fuse(shard(step, mesh, in_specs=specs, out_specs=P())),
    ):
        torch.testing.assert_close(stack(*args), step(*args))


def test_a_checkpoint_keeps_them_apart() -> None:
    """What a policy says of a forward is not said of its gradient."""
    args = drawn()
    step = grad_and_value(checkpoint(linear_loss, policy=policies.save_nothing), (0, 1))
    assert "linear_cross_entropy_with_backward" not in kernels(step, *args)
    torch.testing.assert_close(fuse(step)(*args), step(*args))


def test_ones_like_a_number_wait_for_nothing() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total = x.sum()
        return total, torch.ones_like(total), torch.ones_like(x)

    x = torch.randn(3)
    program = trace(fn)(x)
    joint.let_go_of_losses(program)
    names = [str(node.target) for node in program.calls]
    assert names == ["aten.sum.default", "aten.ones.default", "aten.ones_like.default"]
    torch.testing.assert_close(program.bind()([x]), [*fn(x)])


def test_what_is_said_of_it() -> None:
    x, w, labels = drawn(torch.bfloat16)
    logits = x @ w
    step = grad_and_value(logits_loss)
    (use,) = fuse(step).lower(logits, labels).kernels
    assert (use.phase, use.how, use.operations) == ("forward", "cpu", 4)
    # Read once and written once, two bytes each: the labels, the loss and its cotangent besides.
    assert use.bytes_after == 4 * N * V + 8 * N + 2 + 2
