"""Rewriting of ``as_strided`` and ``as_strided_scatter`` to views that can be split over ranks.

Writes in place appear in a program as strided regions of a tensor's memory. Memory cannot be split over
ranks; rows, slices and diagonals can. If the tensor is dense, a region is usually a row, a slice or a
diagonal along each dim; regions that are not are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.graphs import Inserter, substitute
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten

__all__ = ["unstride"]


Emit = Callable[..., fx.Node]


@dataclass(frozen=True)
class _View:
    """One view of a chain, and the operation that writes it back: ``scatter(x, part, *args)``."""

    read: Any
    scatter: Any
    args: tuple[Any, ...]


def unstride(graph: fx.Graph) -> None:
    """Replace every strided node that is a chain of views. The graph is changed in place."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.as_strided.default:
            _replace(node, node.args[1:], _read)
        elif node.target is aten.as_strided_scatter.default:
            _replace(node, node.args[2:], _scatter)


def _replace(node: fx.Node, where: Sequence[Any], write: Callable[..., Any]) -> None:
    base: torch.Tensor = VAL.of(node.all_input_nodes[0])
    size, stride, *offset = where
    views = _views(base, size, stride, offset[0] if offset else None)
    if views is None:
        return

    substitute(node, write(Inserter(node), node, *views))


def _read(emit: Emit, node: fx.Node, views: Sequence[_View], order: list[int]) -> fx.Node:
    value: Any = node.args[0]
    for view in views:
        value = emit(view.read, value, *view.args)
    return emit(aten.permute.default, value, order)


def _scatter(emit: Emit, node: fx.Node, views: Sequence[_View], order: list[int]) -> fx.Node:
    """Scatter the part back through the same views, in reverse order."""
    source, part = node.args[:2]
    values: list[Any] = [source]
    for view in views[:-1]:
        values.append(emit(view.read, values[-1], *view.args))
    part = emit(aten.permute.default, part, [order.index(d) for d in range(len(order))])
    for value, view in zip(reversed(values), reversed(views), strict=False):
        part = emit(view.scatter, value, part, *view.args)
    return part


def _views(
    base: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> tuple[list[_View], list[int]] | None:
    """The views that select a region of memory, and the order of its dims; None if there are none.

    Dims of size 1 are ignored: whatever their stride, they are added and removed by reshapes.
    """
    if not base.numel() or 1 in base.shape or 1 in size or 0 in size or len(size) > base.ndim:
        return None
    dims = sorted(range(base.ndim), key=base.stride, reverse=True)
    if base.storage_offset() or not base.permute(dims).is_contiguous():
        return None
    rest, first = offset or 0, {}
    for d in dims:
        first[d], rest = divmod(rest, base.stride(d))
    taken = [_dims_of(base, dims, step) for step in stride]
    if any(t is None for t in taken):
        return None
    return _chain(base, list(size), [t for t in taken if t is not None], first)


def _dims_of(base: torch.Tensor, dims: Sequence[int], step: int) -> dict[int, int] | None:
    """The increment of each dim's index per step in memory: one dim, or a diagonal of two."""
    along = {}
    for d in dims:
        if step >= base.stride(d):
            along[d], step = divmod(step, base.stride(d))
    steps = list(along.values())
    return along if not step and (len(steps) == 1 or steps == [1, 1]) else None


def _chain(
    base: torch.Tensor, size: list[int], taken: list[dict[int, int]], first: dict[int, int]
) -> tuple[list[_View], list[int]] | None:
    """The slices, selections and diagonals that make up a region, and the order of its dims.

    Args:
        base: the tensor.
        size: the shape of the region.
        taken: for each dim of the region, the increments of the tensor's indices along it.
        first: the tensor's indices at the region's first element.
    """
    used = [d for along in taken for d in along]
    slices = _slices(base, size, taken, first)
    if len(set(used)) < len(used) or slices is None:
        return None
    # From the last dim to the first, so that each removes a dim behind those that are still to go.
    unused = sorted(set(range(base.ndim)) - set(used), reverse=True)
    selects = [_View(aten.select.int, aten.select_scatter.default, (d, first[d])) for d in unused]
    diagonals, dims = _diagonals(taken, sorted(used))
    views = [*slices, *selects, *diagonals]
    return (views, [dims.index(next(iter(along))) for along in taken]) if views else None


def _slices(
    base: torch.Tensor, size: list[int], taken: list[dict[int, int]], first: dict[int, int]
) -> list[_View] | None:
    """The slices along the dims of a region; None if it extends beyond the end of one."""
    views = []
    for along, n in zip(taken, size, strict=True):
        for d, step in along.items():
            stop = first[d] + (n - 1) * step + 1
            if stop > base.shape[d]:
                return None
            if (first[d], stop, step) != (0, base.shape[d], 1):
                args = (d, first[d], stop, step)
                views.append(_View(aten.slice.Tensor, aten.slice_scatter.default, args))
    return views


def _diagonals(taken: list[dict[int, int]], dims: list[int]) -> tuple[list[_View], list[int]]:
    """The diagonals of pairs of dims, and the dims of the value after them: a diagonal's is the last."""
    views = []
    for along in taken:
        if len(along) == 2:
            pair = tuple(dims.index(d) for d in along)
            views.append(_View(aten.diagonal.default, aten.diagonal_scatter.default, (0, *pair)))
            dims = [d for d in dims if d not in along] + [next(iter(along))]
    return views, dims
