"""A kernel written against public names: found in a program, and in the place of what it computes."""

from __future__ import annotations

import torch
from any_size import fuse

from torchard import Kernel


def reference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x - y).square().sum(-1)


calls: list[tuple[int, ...]] = []


def distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    calls.append(tuple(x.shape))
    return torch.einsum("...d,...d->...", x - y, x - y)


DISTANCE = Kernel("distance", (reference,), "... d, ... d -> ...", {"any": distance})


def test_it_runs_in_the_place_of_what_it_computes() -> None:
    x, y = torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)
    f = fuse(lambda x, y: ((x - y) ** 2).sum(1).sqrt(), DISTANCE)
    assert [str(use) for use in f.lower(x, y).kernels] == ["distance"]
    torch.testing.assert_close(f(x, y), torch.linalg.vector_norm(x - y, dim=1))
    assert calls
