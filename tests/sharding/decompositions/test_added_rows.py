"""A sum of rows into zeros is as far apart as it comes, however its operands are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchard import trace
from torchard.sharding.decompositions.decompose import decompose

aten = torch.ops.aten

X, IDS = torch.zeros(4, 3), torch.tensor([1, 1])
ADDED: dict[str, Any] = {
    "index_put": lambda t, x, ids: t.index_put((ids,), x[:2], accumulate=True),
    "index_put, later dim": lambda t, x, ids: aten.index_put(t, [None, ids], x[:, :2], True),
    "index_add": lambda t, x, ids: t.index_add(0, ids, x[:2]),
    "scatter_add": lambda t, x, ids: t.scatter_add(0, ids[:, None].expand(2, 3), x[:2]),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_sum_into_zeros_stays_as_it_is(name: str) -> None:
    program = trace(lambda x, ids: ADDED[name](torch.zeros(4, 3), x, ids))(X, IDS)
    (call,) = (n for n in program.calls if n.name.startswith(name.split(",")[0]))
    assert decompose(program.graph, call) == []


@pytest.mark.parametrize("name", ADDED)
def test_a_sum_into_a_table_is_the_table_and_a_sum_into_zeros(name: str) -> None:
    program = trace(ADDED[name])(X, X, IDS)
    (call,) = (n for n in program.calls if n.name.startswith(name.split(",")[0]))
    pieces = decompose(program.graph, call)
    (inner,) = (n for n in pieces if n.target is call.target)
    assert decompose(program.graph, inner) == []
