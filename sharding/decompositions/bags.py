"""Decompositions of bags of rows: lookups that are added up for each bag, or compared.

Partial sums of a split table add up after the rows of each bag, so [bags, columns] is reduced. Of maxima
each rank sends the largest of its rows, and the first place where it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.decompositions.functional_forms import register_decomposition
from torchard.sharding.rules.data_movement.bags import first_of_bags, largest_of_bags

_SUM, _MEAN, _MAX = range(3)


def _bag_of_each(offsets: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The bag of each id; empty bags have none."""
    at = torch.arange(len(ids), dtype=offsets.dtype, device=ids.device)
    return torch.searchsorted(offsets.contiguous(), at, right=True) - 1


def _that_count(
    offsets: torch.Tensor, ids: torch.Tensor, last: bool, padding: int
) -> torch.Tensor | None:
    """Which ids count: neither padding, nor after the last bag's end; None for all."""
    counts = None if padding < 0 else ids != padding
    if last:
        inside = torch.arange(len(ids), dtype=offsets.dtype, device=ids.device) < offsets[-1]
        counts = inside if counts is None else counts & inside
    return counts


def _added(x: torch.Tensor, bag: torch.Tensor, bags: int) -> torch.Tensor:
    """The sums over each bag, of [n, ...]; in float32 for half precision, as torch's kernel."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    zeros = torch.zeros(bags, *x.shape[1:], dtype=wide, device=x.device)
    return zeros.index_add(0, bag, x.to(wide))


@register_decomposition(aten._embedding_bag.default)
def _bags(table: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, *how: Any) -> Any:
    return _forward(table, ids, offsets, False, *how)


@register_decomposition(aten._embedding_bag_forward_only.default)
def _bags_forward_only(
    table: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, *how: Any
) -> Any:
    return _forward(table, ids, offsets, True, *how)


def _forward(
    table: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    forward_only: bool,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    weights: torch.Tensor | None = None,
    last: bool = False,
    padding: int = -1,
) -> Any:
    """The bags, and what torch's kernel saves: each id's bag, sizes of bags, and ids of maxima."""
    bags = len(offsets) - last
    bag = _bag_of_each(offsets[:bags], ids)
    counts = _that_count(offsets, ids, last, padding)
    ones = torch.ones_like(ids) if counts is None else counts.to(ids.dtype)
    sizes = ids.new_zeros(bags) if mode == _SUM else _added(ones, bag, bags)
    on_cpu = ids.device.type == "cpu"
    places = sizes if on_cpu else ids.new_zeros(0)  # of maxima only; torch's kernel copies sizes
    if mode == _MAX:
        out, places = _largest(table, ids, ones > 0, bag, sizes)
    else:
        rows = F.embedding(ids, table)
        rows = rows if weights is None else rows * weights[:, None]
        rows = rows if counts is None else rows.masked_fill(~counts[:, None], 0)
        out = _added(rows, bag, bags)
        out = (out if mode == _SUM else out / sizes.clamp(min=1)[:, None]).to(table.dtype)
    numbered = not (on_cpu and mode == _SUM and _is_fast(table, weights, padding))
    more = last and (forward_only or not on_cpu)
    saved = (bag if numbered else bag[:0], F.pad(sizes, (0, 1)) if more else sizes, places)
    return out, *(x.to(offsets.dtype) for x in saved)


def _is_fast(table: torch.Tensor, weights: torch.Tensor | None, padding: int) -> bool:
    """Whether torch's kernel for CPUs adds up rows without numbering the bags of ids."""
    columns = weights is None or weights.stride(0) == 1
    fits = table.dtype in (torch.float32, torch.float16) and table.stride(1) == 1
    return fits and columns and padding < 0


def _largest(
    table: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    bag: torch.Tensor,
    sizes: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest rows of each bag, and the ids of the first of them; zeros for empty bags."""
    bag = bag.long()
    best = largest_of_bags(table, ids, counts, bag, len(sizes))
    first = first_of_bags(table, ids, counts, bag, best).clamp(max=len(ids) - 1)
    empty = (sizes == 0)[:, None]
    return best.masked_fill(empty, 0), aten.index.Tensor(ids, [first]).masked_fill(empty, 0)


@register_decomposition(aten._embedding_bag_backward.default)
def _bags_backward(
    grad: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    numbers: torch.Tensor,
    sizes: torch.Tensor,
    places: torch.Tensor,
    rows: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    weights: torch.Tensor | None,
    padding: int = -1,
) -> Any:
    if scale_grad_by_freq or sparse:
        return NotImplemented
    bags = len(grad)
    if mode == _MAX:
        grad = grad.masked_fill((sizes[:bags] == 0)[:, None], 0)
        zeros = grad.new_zeros(rows, grad.shape[1])
        return zeros.scatter_add(0, places.long().clamp(min=0), grad)
    if mode == _MEAN:
        grad = grad / sizes[:bags].clamp(min=1)[:, None]
    each = grad.index_select(0, _bag_of_each(offsets[:bags], ids))
    each = each if weights is None else each * weights[:, None]
    counts = _that_count(offsets, ids, len(offsets) > bags, padding)
    each = each if counts is None else each.masked_fill(~counts[:, None], 0)
    return aten.embedding_dense_backward.default(each, ids, rows, -1, False)


@register_decomposition(aten._embedding_bag_per_sample_weights_backward.default)
def _weights_backward(
    grad: torch.Tensor,
    table: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    numbers: torch.Tensor,
    mode: int,
    padding: int = -1,
) -> Any:
    bags = len(grad)
    each = grad.index_select(0, _bag_of_each(offsets[:bags], ids))
    counts = _that_count(offsets, ids, len(offsets) > bags, padding)
    out = (each * F.embedding(ids, table)).sum(1)
    return out if counts is None else out.masked_fill(~counts, 0)
