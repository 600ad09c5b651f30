"""Writes of one row to a cache whose rows are split: no rank copies its part, or sends anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchard import Mesh, P, full, jit, place, shard
from torchard.transforms import op_name

CACHE = torch.arange(2 * 12 * 6.0).reshape(2, 12, 6)
Write = Callable[[Tensor, Tensor, Tensor], Tensor]

WRITES: dict[str, Write] = {
    "index_copy": lambda c, at, x: c.index_copy(1, at, x),
    "c[:, at] = x": lambda c, at, x: assigned(c, (slice(None), at), x),
    "of one value": lambda c, at, x: assigned(c, (slice(None), at), x[0, 0, 0]),
    "by a number": lambda c, at, x: assigned(c, (slice(None), at[0]), x[:, 0]),
    "two split dims": lambda c, at, x: assigned(c, (slice(None), at, at % 6), x[:, :, 0]),
}


def assigned(cache: Tensor, place: Any, x: Tensor) -> Tensor:
    cache = cache.clone()
    cache[place] = x
    return cache


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", WRITES)
def test_single_writes(name: str, ranks: int) -> None:
    mesh = Mesh({"s": ranks, "t": 2}, virtual=True)
    spec = P(None, "s", "t") if name == "two split dims" else P(None, "s")
    step = jit(shard(WRITES[name], mesh, out_specs=spec), backend="eager", donate_argnums=0)
    x = torch.full((2, 1, 6), -1.0)
    have, want = place(CACHE, mesh, spec), CACHE
    for at in (0, 3, 7, 11, 5) if name == "index_copy" else (0, 3, 7, 11, -1, -12, 5):
        index = torch.tensor([at])
        program = step.lower(have, index, x)
        graph = program.runtime.graph(program).graph
        assert not program.collectives
        assert all(op_name(node) != "aten.cat" for node in graph.nodes if node.op == "call_function")
        have, want = step(have, index, x), WRITES[name](want, index, x)
        assert torch.equal(full(have), want)
