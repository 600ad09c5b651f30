"""Derivations and transforms crossed, and how their results are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from any_size import fuse
from hypothesis import settings

from torchard import checkpoint, jit
from torchard.sharding import Mesh, MeshTensor, P, shard

F64 = torch.float64

MESH = Mesh({"dp": 2}, virtual=True)

TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "shard": lambda f: shard(f, MESH, None, P()),
    "checkpoint": checkpoint,
    "fuse": fuse,
    "jit": lambda f: jit(f, backend="eager"),
}

# By turns in `make test`, each with each in `make explore`.
FEW = settings.get_current_profile_name() == "ci"


def crossed(argument: str, table: Iterable[str], names: Iterable[str] = TRANSFORMS) -> Any:
    """Parametrise by the entries of a table, and for each of them by transforms."""
    names = list(names)
    pairs = [
        (entry, name)
        for i, entry in enumerate(table)
        for name in ([names[i % len(names)]] if FEW else names)
    ]
    return pytest.mark.parametrize((argument, "name"), pairs)

everywhere = pytest.mark.parametrize("name", TRANSFORMS)


def same(have: Any, want: Any) -> None:
    torch.testing.assert_close(whole(have), want, rtol=1e-9, atol=1e-9, equal_nan=True)


def whole(value: Any) -> Any:
    """What a transform around a shard gives may live on its mesh."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(whole, value))
    return value.full() if isinstance(value, MeshTensor) else value

W = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))

X = torch.randn(5, 3, dtype=F64, generator=torch.Generator().manual_seed(1))
