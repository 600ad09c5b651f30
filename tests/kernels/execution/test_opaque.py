"""A kernel with code of its own runs that code, also where a compiler runs everything around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, grad_and_value

from torchard import Kernel, checkpoint, fuse, jit, policies, repeat
from torchard.functional.programs.kernel_call import Fused

DRAW = torch.Generator().manual_seed(0)
X, W, B, WS = (
    torch.randn(shape, generator=DRAW, dtype=torch.float64) for shape in ((6, 8), (8, 8), (8,), (3, 8, 8))
)


def reference(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b) * x


@pytest.fixture
def ran() -> Counter[str]:
    """The number of calls of the kernel's implementations, on tensors that have memory."""
    return Counter()


@pytest.fixture
def kernel(ran: Counter[str]) -> Kernel:
    def forward(x: Tensor, b: Tensor) -> Tensor:
        assert type(x) is Tensor
        ran["forward"] += 1
        return F.gelu(x + b) * x

    def backward(x: Tensor, b: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        assert type(x) is Tensor
        ran["backward"] += 1
        y = x + b
        slope = 0.5 * (1 + torch.erf(y * 0.5**0.5)) + y * torch.exp(-y * y / 2) / (2 * torch.pi) ** 0.5
        to_b = cotangent * slope * x
        return to_b + cotangent * F.gelu(y), to_b.sum(0)

    return Kernel("mine", (reference,), "n d, d -> n d", {"any": forward}, {"any": backward})


def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A kernel between operations that a compiler fuses."""
    return reference(torch.sin(x @ w) * 2, b).cos() + x


def loss(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return layer(layer(x, w, b), w.t(), b).square().mean()


def looped(x: Tensor, ws: Tensor, b: Tensor) -> Tensor:
    return repeat(lambda w, x: layer(x, w, b), ws, x).square().mean()


def assert_run(
    fn: Callable[..., Any], args: tuple[Tensor, ...], kernel: Kernel, ran: Counter[str], **counts: int
) -> None:
    """The first call also compares what the implementations return with their references."""
    want = fn(*args)
    run = jit(fuse(fn, kernel))
    program = run.lower(*args)
    assert {str(use.how) for use in program.kernels} == {"kernel"}
    assert all(n.target.opaque for n in program.calls if isinstance(n.target, Fused))
    torch.testing.assert_close(run(*args), want)
    ran.clear()
    torch.testing.assert_close(run(*args), want)
    assert ran == counts


def test_in_a_forward(kernel: Kernel, ran: Counter[str]) -> None:
    assert_run(layer, (X, W, B), kernel, ran, forward=1)


def test_with_gradients_inside(kernel: Kernel, ran: Counter[str]) -> None:
    assert_run(grad_and_value(loss, (0, 1, 2)), (X, W, B), kernel, ran, forward=2, backward=2)


def test_in_a_loop(kernel: Kernel, ran: Counter[str]) -> None:
    assert_run(looped, (X, WS, B), kernel, ran, forward=3)
    assert_run(grad(looped, (0, 1, 2)), (X, WS, B), kernel, ran, forward=3, backward=3)


@pytest.mark.parametrize("recomputed", [False, True])
def test_with_gradients_outside(kernel: Kernel, ran: Counter[str], recomputed: bool) -> None:
    fn = checkpoint(loss, policy=policies.save_nothing) if recomputed else loss
    run = jit(fuse(fn, kernel))
    given = [t.clone().requires_grad_() for t in (X, W, B)]
    want = torch.autograd.grad(loss(*given), given)
    for _ in range(2):
        ran.clear()
        torch.testing.assert_close(torch.autograd.grad(run(*given), given), want)
    assert ran == {"forward": 4 if recomputed else 2, "backward": 2}


def test_with_donated_arguments(kernel: Kernel, ran: Counter[str]) -> None:
    """What a kernel reads is not written over before it runs."""

    def step(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = reference(x, b)
        return x + 1, (y @ w).sin(), reference(x.exp(), b)

    run = jit(fuse(step, kernel), donate_argnums=0)
    want = step(X, W, B)
    for _ in range(2):
        ran.clear()
        torch.testing.assert_close(run(X.clone(), W, B), want)
    assert ran == {"forward": 2}


def test_a_reference_is_compiled_with_its_neighbours() -> None:
    """A kernel without code of its own is no call between two regions."""
    program = jit(fuse(layer, reference)).lower(X, W, B)
    targets = [n.target for n in program.calls if isinstance(n.target, Fused)]
    assert targets and not any(target.opaque for target in targets)
