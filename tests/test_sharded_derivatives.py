"""Derivatives of small functions on a mesh, stacked in every way, are one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from torchard import Mesh, P, checkpoint, place, policies, shard

MESH = Mesh({"tp": 2}, virtual=True)


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole(value: Any) -> torch.Tensor:
    full: torch.Tensor = value.full() if hasattr(value, "full") else value
    return full


def compare(have: Any, want: Any) -> None:
    pairs = zip(have, want, strict=True) if isinstance(want, tuple) else [(have, want)]
    for one, other in pairs:
        torch.testing.assert_close(whole(one), other, rtol=1e-10, atol=1e-10)


NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "group norm": lambda x: F.group_norm(x, 2),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("order", ["outside", "around", "inside"])
@pytest.mark.parametrize("name", NORMS)
def test_a_budget_of_operations_without_parameters(name: str, order: str) -> None:
    """Their derivatives' last results are None."""

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = NORMS[name](F.conv1d(x, w, padding=1).sin())
        return x.square().sum()

    def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
        return checkpoint(fn, policy=policies.budget(fraction=0.5))

    x, w = random(4, 6, 8), random(6, 6, 3)
    stacks = {
        "outside": torch.func.grad(checked(shard(loss, MESH)), (0, 1)),
        "around": torch.func.grad(shard(checked(loss), MESH), (0, 1)),
        "inside": shard(torch.func.grad(checked(loss), (0, 1)), MESH),
    }
    compare(stacks[order](place(x, MESH, P("tp")), w), torch.func.grad(loss, (0, 1))(x, w))


FACTORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex": lambda x: (torch.fft.rfft(x) * (1 + 2j)).abs().sum(),
    "complex, divided": lambda x: (torch.fft.rfft(x) / (1 + 2j) - 0.5j).abs().sum(),
    "complex, a power": lambda x: ((x + 3j) ** (2 + 0.5j)).abs().sum(),
    "real": lambda x: (torch.fft.rfft(x) * 3.0).abs().sum(),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("spec", [P("tp"), P(None, "tp")], ids=str)
@pytest.mark.parametrize("name", FACTORS)
def test_a_number_as_a_factor(name: str, spec: P, inside: bool) -> None:
    fn, x = FACTORS[name], random(4, 6)
    derive = torch.func.grad(fn)
    run = shard(lambda x: derive(x), MESH) if inside else torch.func.grad(shard(fn, MESH))
    compare(run(place(x, MESH, spec)), derive(x))
