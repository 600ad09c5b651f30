"""Programs that differ from a pattern by one number: whatever is found in them, their values stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from any_size import fuse
from torch import Tensor

from torchard import find
from torchard.functional.core.errors import NoMatch

Function = Callable[..., Tensor]
X, B, W = torch.randn(4, 6), torch.randn(6), torch.randn(6, 6)


def biased(x: Tensor, b: Tensor) -> Tensor:
    return torch.relu(x + b)


def product(x: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w + b)


def centred(x: Tensor) -> Tensor:
    return torch.sin(x - x.mean(-1, keepdim=True))


def gated(x: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(torch.sin(x) + b)


NEAR: dict[str, tuple[Function, Function]] = {
    "a factor of a term": (biased, lambda x, b: torch.relu(torch.add(x, b, alpha=2))),
    "a factor of what is taken away": (
        lambda x, b: torch.relu(x - b),
        lambda x, b: torch.relu(torch.sub(x, b, alpha=3)),
    ),
    "a factor of a sum": (biased, lambda x, b: torch.relu(2 * (x + b))),
    "a sum of a sum's factor": (
        lambda x, b: torch.sin(x + b + b),
        lambda x, b: torch.sin(x + 3 * (b + x)),
    ),
    "an upper bound": (biased, lambda x, b: torch.clamp(x + b, 0, 0.5)),
    "a lower bound": (biased, lambda x, b: torch.clamp(x + b, min=-0.5)),
    "a factor of a bias": (product, lambda x, b, w: torch.relu(torch.addmm(b, x, w, beta=2))),
    "a factor of a product": (product, lambda x, b, w: torch.relu(torch.addmm(b, x, w, alpha=2))),
    "a turned matrix": (product, lambda x, b, w: torch.relu(x @ w.t() + b)),
    "a sum for a mean": (centred, lambda x: torch.sin(x - x.sum(-1, keepdim=True))),
    "a mean of a part": (centred, lambda x: torch.sin(x - x[:, :3].mean(-1, keepdim=True))),
    "a rounding inside": (gated, lambda x, b: torch.sigmoid(torch.sin(x).bfloat16().float() + b)),
    "the root of a square": (gated, lambda x, b: torch.sigmoid(torch.sin((x * x).sqrt()) + b)),
    "the other half": (
        lambda a: torch.sigmoid(a) * torch.sin(a),
        lambda x: torch.sigmoid(x[:, :3]) * torch.sin(x[:, 3:]),
    ),
    "a sum of repeated values": (
        lambda a: torch.sigmoid(a) * torch.sin(a),
        lambda x: torch.sigmoid(x.expand(3, 4, 6).sum(0)) * torch.sin(x),
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_values_stay(name: str) -> None:
    pattern, program = NEAR[name]
    args = (X, B, W)[: program.__code__.co_argcount]
    with contextlib.suppress(NoMatch):
        found = fuse(program, pattern, compiler="eager")(*args)
        torch.testing.assert_close(found, program(*args))
    torch.testing.assert_close(fuse(program, compiler="eager")(*args), program(*args))


@pytest.mark.parametrize("dtype, kept", [(torch.int64, 2), (torch.bool, 1), (torch.uint8, 2)])
def test_constants_drop_what_their_dtype_cannot_hold(dtype: torch.dtype, kept: int) -> None:
    def pattern(x: Tensor) -> Tensor:
        return torch.relu(x + kept)

    def cast(x: Tensor) -> Tensor:
        return torch.relu(x + torch.full((), 2.7).to(dtype).float())

    assert len(find(cast, pattern)(X)) == 1
    assert not find(cast, lambda x: torch.relu(x + 2.7))(X)
