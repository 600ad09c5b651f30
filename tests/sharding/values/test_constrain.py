"""constrain: values, cotangents and tangents have its spec, in every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchard import Mesh, P, constrain, shard

MESH = Mesh({"tp": 2}, virtual=True)
X = torch.arange(8.0).reshape(4, 2)


def pinned(x: Tensor) -> Tensor:
    return constrain(x * 2, P("tp")).sin()


def plain(x: Tensor) -> Tensor:
    return (x * 2).sin()


DERIVED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "value": lambda f: f,
    "gradient": lambda f: torch.func.grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    "jacfwd": torch.func.jacfwd,
    "vmap": torch.vmap,
    "jvp of gradient": lambda f: (
        lambda x: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (x,), (x,))
    ),
}


@pytest.mark.parametrize("derived", DERIVED)
def test_it_is_the_identity(derived: str) -> None:
    want = DERIVED[derived](plain)(X)
    torch.testing.assert_close(DERIVED[derived](pinned)(X), want)
    torch.testing.assert_close(shard(DERIVED[derived](pinned), MESH, out_specs=P())(X), want)
    torch.testing.assert_close(DERIVED[derived](shard(pinned, MESH, out_specs=P()))(X), want)


def test_tangents_are_constrained() -> None:
    """The tangent of a split value is split, so both are gathered once for a replicated result."""
    run = shard(lambda x: torch.func.jvp(pinned, (x,), (x,)), MESH, out_specs=P())
    assert [c.kind for c in run.lower(X).collectives] == ["all_gather"] * 2
