"""Rows added to a table, as the table and the sum of the rows: the sum may be computed in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.decompositions.functional_forms import register_decomposition


@register_decomposition(aten.index_put.default)
def _index_put(
    table: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Any:
    if not accumulate or any(i is not None and i.dtype == torch.bool for i in indices):
        return NotImplemented
    zeros = torch.zeros_like(table)
    rows = aten.index.Tensor(zeros, indices).shape
    return table + aten.index_put.default(zeros, indices, values.expand(rows), True)


@register_decomposition(aten.index_add.default)
def _index_add(
    table: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, **alpha: Any
) -> torch.Tensor:
    added: torch.Tensor = aten.index_add.default(torch.zeros_like(table), dim, index, source, **alpha)
    return table + added


@register_decomposition(aten.scatter_add.default)
def _scatter_add(
    table: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    added: torch.Tensor = aten.scatter_add.default(torch.zeros_like(table), dim, index, source)
    return table + added


@register_decomposition(aten.put.default)
def _put(
    table: torch.Tensor, index: torch.Tensor, source: torch.Tensor, accumulate: bool = False
) -> torch.Tensor:
    flat, (ids, values) = table.reshape(-1), (index.reshape(-1), source.reshape(-1))
    written: torch.Tensor = aten.index_put.default(flat, [ids], values, accumulate)
    return written.reshape(table.shape)
