"""What reads a kernel's results through views finds them laid out as it did before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchard import find, fuse
from torchard.kernels import KERNELS

X, B = torch.linspace(-1, 1, 192).reshape(4, 6, 8), torch.linspace(-1, 0, 8)


def biased_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshaped across": lambda h: h.transpose(0, 1).reshape(-1),
    "contiguous, viewed": lambda h: h.transpose(0, 1).contiguous().view(-1),
    "copied, computed, viewed": lambda h: h.transpose(0, 2).contiguous().sin().view(8, 24),
    "copied as it is": lambda h: h.transpose(0, 1).clone().sin(),
    "a copy of it all": lambda h: h.clone().view(-1),
    "in two layouts": lambda h: h.transpose(0, 1).reshape(24, 8) @ h.view(24, 8).t(),
    "heads": lambda h: h.view(4, 6, 2, 4).transpose(1, 2).reshape(8, 6, 4).flatten(),
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_of_results(reader: str) -> None:
    def fn(x: Tensor, b: Tensor) -> Tensor:
        return READERS[reader](biased_gelu(x, b))

    fused = fuse(fn, biased_gelu, compiler="eager")
    have, want = fused(X, B), fn(X, B)
    assert torch.equal(have, want) and have.stride() == want.stride()
    assert [str(use) for use in fused.lower(X, B).kernels] == ["biased_gelu"]


def test_inputs_that_only_opaque_operations_read() -> None:
    """The gradient of a rotation reads cos and sin of [1, s, d] through the backward of slices."""
    q = torch.linspace(-1, 1, 288).reshape(2, 3, 6, 8)
    angles = torch.linspace(0, 1, 48).reshape(1, 6, 8)

    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 4:], x[..., :4]), -1)

    def rotated(q: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        return (q * cos + turned(q) * sin).sin().sum()

    matches = find(torch.func.grad(rotated), KERNELS["rope"])(q, angles)
    assert [match.name for match in matches] == ["rope", "rope_backward"]
