"""The implementations of cross-entropy themselves: by chunks of rows, with rows that do not count."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import outputs
from torch import Tensor

from torchard.kernels import KERNELS

OF_LOGITS, OF_LINEAR = (
    importlib.import_module(f"torchard.kernels.library.{name}")
    for name in ("cross_entropy", "linear_cross_entropy")
)
CAP = 1.5
ROWS, WIDTH, CLASSES = 1999, 5, 7
X, W, B = (ROWS, WIDTH), (WIDTH, CLASSES), (CLASSES,)

# The logits of each kernel, the shapes of their operands, and the kernel's literals.
Loss = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], dict[str, float]]
LOSSES: dict[str, Loss] = {
    "cross_entropy": (lambda logits: logits, ((ROWS, CLASSES),), {}),
    "linear_cross_entropy": (lambda x, w: x @ w, (X, W), {}),
    "linear_cross_entropy_biased": (lambda x, w, b: x @ w + b, (X, W, B), {}),
    "linear_cross_entropy_capped": (
        lambda x, w: CAP * torch.tanh(x @ w / CAP), (X, W), {"cap": CAP}
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", list(LOSSES))
def test_by_chunks_it_is_the_mean_over_rows_that_count(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OF_LOGITS, "_CHUNK", 10 * CLASSES)
    monkeypatch.setattr(OF_LINEAR, "_ELEMENTS", 10 * CLASSES)
    labels = torch.arange(ROWS) % CLASSES
    labels[::3] = -100
    logits, shapes, literals = LOSSES[name]
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    cotangent = torch.tensor(2.0, dtype=dtype)
    exact = [x.double().clone().requires_grad_() for x in given]
    value = F.cross_entropy(logits(*exact), labels)
    gradients = torch.autograd.grad(value, exact, cotangent.double())
    kernel = KERNELS[name]
    joint = kernel.joint["cpu" if "cpu" in kernel.joint else "any"]
    assert isinstance(kernel.vjp, dict)
    for have, want in (
        (kernel.implementations["any"](*given, labels, **literals), [value]),  # type: ignore[operator]
        (kernel.vjp["any"](*given, labels, cotangent, **literals), gradients),
        (joint(*given, labels, cotangent, **literals), [value, *gradients]),  # type: ignore[operator]
    ):
        for a, b in zip(outputs(have), want, strict=True):
            # The rounding of the result, and of a product of logits; sums over rows are not rounded.
            roundings = 1 if len(given) == 1 else 4
            error = max(roundings * torch.finfo(dtype).eps, 1e-12)
            assert (a.double() - b).abs().max() <= error * b.abs().max()
