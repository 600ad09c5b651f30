"""What kernels with loops of their own never hold at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _live import LiveBytes
from torch import Tensor

from torchard.kernels import KERNELS

N, D, V = 2048, 16, 16384


def peak(run: Any, *args: Tensor, **literals: float) -> int:
    with LiveBytes(args) as live:
        run(*args, **literals)
    return live.peak(args)


@pytest.mark.parametrize(
    ("name", "chunks", "literals"),
    [
        ("linear_cross_entropy", 1, {}),
        ("linear_cross_entropy_biased", 1, {}),
        ("linear_cross_entropy_capped", 2, {"cap": 30.0}),  # the tanh and the logits
    ],
)
def test_logits_of_a_linear_are_never_all_there(
    name: str, chunks: int, literals: dict[str, float]
) -> None:
    """A quarter of them is; the calls one after another use the same memory."""
    bias = [torch.randn(V)] if "biased" in name else []
    args = [torch.randn(N, D), torch.randn(D, V), *bias, torch.randint(V, (N,))]
    kernel = KERNELS[name]
    chunk, weights = N * V * 4 / 4, D * V * 4
    assert isinstance(kernel.vjp, dict)
    assert peak(kernel.implementations["any"], *args, **literals) < (chunks + 0.5) * chunk
    # The weight's gradient has to be there; the chunk's logits and what is made of them as well.
    for run in (kernel.vjp["any"], kernel.joint["any"]):
        limit = (chunks + 0.5) * chunk + 2 * weights
        assert peak(run, *args, torch.ones(()), **literals) < limit


def test_the_gradient_of_logits_is_the_one_buffer_of_their_size() -> None:
    logits, labels = torch.randn(N, V), torch.randint(V, (N,))
    kernel = KERNELS["cross_entropy"]
    size = N * V * 4
    assert isinstance(kernel.vjp, dict)
    assert peak(kernel.implementations["any"], logits, labels) < size / 2
    for run in (kernel.vjp["any"], kernel.joint["cpu"]):
        assert peak(run, logits, labels, torch.ones(())) < 1.5 * size
