"""What kernels with loops of their own never hold at once."""

from __future__ import annotations

from typing import Any

import torch
from _live import LiveBytes
from torch import Tensor

from torchard.kernels import KERNELS

N, D, V = 2048, 16, 16384


def peak(run: Any, *args: Tensor) -> int:
    with LiveBytes(args) as live:
        run(*args)
    return live.peak(args)


def test_logits_of_a_linear_are_never_all_there() -> None:
    x, w, labels = torch.randn(N, D), torch.randn(D, V), torch.randint(V, (N,))
    kernel = KERNELS["linear_cross_entropy"]
    logits, weights = N * V * 4, D * V * 4
    assert isinstance(kernel.vjp, dict)
    assert peak(kernel.implementations["any"], x, w, labels) < logits / 2
    # The weight's gradient has to be there; the chunk's logits and what is made of them as well.
    for run in (kernel.vjp["any"], kernel.joint["any"]):
        assert peak(run, x, w, labels, torch.ones(())) < logits / 2 + 2 * weights


def test_the_gradient_of_logits_is_the_one_buffer_of_their_size() -> None:
    logits, labels = torch.randn(N, V), torch.randint(V, (N,))
    kernel = KERNELS["cross_entropy"]
    size = N * V * 4
    assert isinstance(kernel.vjp, dict)
    assert peak(kernel.implementations["any"], logits, labels) < size / 2
    for run in (kernel.vjp["any"], kernel.joint["cpu"]):
        assert peak(run, logits, labels, torch.ones(())) < 1.5 * size
