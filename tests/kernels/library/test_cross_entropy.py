"""The implementations of cross-entropy themselves: by chunks of rows, with rows that do not count."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import outputs
from torch import Tensor

from torchard.kernels import KERNELS

MODULE = importlib.import_module("torchard.kernels.library.cross_entropy")
ROWS, WIDTH, CLASSES = 1999, 5, 7


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_by_chunks_it_is_the_mean_over_rows_that_count(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_CHUNK", "_LOGITS"):
        monkeypatch.setattr(MODULE, limit, 10 * CLASSES)
    labels = torch.arange(ROWS) % CLASSES
    labels[::3] = -100
    shapes = {1: [(ROWS, CLASSES)], 2: [(ROWS, WIDTH), (WIDTH, CLASSES)]}[name.count("_")]
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    cotangent = torch.tensor(2.0, dtype=dtype)

    def loss(*operands: Tensor) -> Tensor:
        return F.cross_entropy(operands[0] if len(operands) == 1 else operands[0] @ operands[1], labels)

    exact = [x.double().requires_grad_() for x in given]
    value = loss(*exact)
    gradients = torch.autograd.grad(value, exact, cotangent.double())
    kernel = KERNELS[name]
    joint = kernel.joint["cpu" if "cpu" in kernel.joint else "any"]
    assert isinstance(kernel.vjp, dict)
    for have, want in (
        (kernel.implementations["any"](*given, labels), [value]),  # type: ignore[operator]
        (kernel.vjp["any"](*given, labels, cotangent), gradients),
        (joint(*given, labels, cotangent), [value, *gradients]),  # type: ignore[operator]
    ):
        for a, b in zip(outputs(have), want, strict=True):
            # The rounding of the result, and of a product of logits; sums over rows are not rounded.
            roundings = 1 if len(given) == 1 else 4
            error = max(roundings * torch.finfo(dtype).eps, 1e-12)
            assert (a.double() - b).abs().max() <= error * b.abs().max()
