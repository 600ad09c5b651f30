"""Rows that are looked up, put or added by a list of places, and histograms: however they are written."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional.programs.constants import is_one, is_zero
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.rules.data_movement.counting import counted

__all__ = ["Added", "Taken", "added", "counted_by", "list_of", "placed", "taken"]


_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


class Taken(NamedTuple):
    """``x[at]``: rows of x."""

    x: Any
    at: Any


class Added(NamedTuple):
    """Rows that are put into those of a table, or added to them."""

    table: Any
    at: Any
    values: Any


def taken(node: fx.Node) -> Taken | None:
    """The lookup of rows that a node is."""
    args: Any = node.args
    if node.target is aten.index.Tensor:
        x, (at, *others) = args
        return None if others or at is None else Taken(x, at)
    if node.target is aten.index_select.default and args[1] == 0:
        return Taken(args[0], args[2])
    if node.target is aten.gather.default and args[1] == 0:
        return Taken(args[0], list_of(args[2])) if _are_rows(args[0], args[2]) else None
    return None


def added(node: fx.Node) -> Added | None:
    """The sum of rows into a table that a node is."""
    args: Any = node.args
    if node.target is aten.index_put.default and len(args) > 3 and args[3]:
        table, (at, *others), values, _ = args
        return None if others or at is None else Added(table, at, values)
    if node.target is aten.index_add.default and args[1] == 0 and not node.kwargs:
        return Added(args[0], *args[2:4])
    if node.target is aten.scatter_add.default and args[1] == 0 and _are_rows(args[0], args[2]):
        return Added(args[0], list_of(args[2]), args[3])
    return None


def placed(node: fx.Node) -> Added | None:
    """The list of values, each put into one place of a list, that a node is."""
    args: Any = node.args
    if node.target is aten.index_put.default and not (len(args) > 3 and args[3]):
        table, (at, *others), values, *_ = args
        return None if others or at is None else Added(table, at, values)
    if node.target is aten.scatter.src and VAL.of(args[0]).ndim == 1:
        return Added(args[0], *args[2:4])
    return None


def list_of(at: fx.Node) -> fx.Node | None:
    """The list that a value repeats along all dims but the first; None if it repeats none."""
    (size, *_) = VAL.of(at).shape or (0,)
    while VAL.of(at).ndim > 1:
        if at.target not in (aten.unsqueeze.default, aten.expand.default, aten.view.default):
            return None
        (source,) = at.all_input_nodes
        have, made = VAL.of(source).shape, VAL.of(at).shape
        keeps = have[:1] == made[:1] == (size,)
        if not keeps or (at.target is aten.view.default and have.numel() != size):
            return None
        if at.target is aten.expand.default and len(have) != len(made):
            return None
        at = source
    return at


def _are_rows(x: Any, at: Any) -> bool:
    """Whether whole rows of x are meant."""
    return VAL.of(x).shape[1:] == VAL.of(at).shape[1:] and list_of(at) is not None


def counted_by(ends: Any) -> fx.Node | None:
    """The list of groups whose number of members these ends add up; None for other lists."""
    (groups,) = VAL.of(ends).shape
    ends = _uncast(ends)
    return _histogram(_uncast(ends.args[0]), groups) if ends.target is aten.cumsum.default else None


def _histogram(counts: Any, groups: int) -> fx.Node | None:
    if counts.target is aten.histc.default:
        ids, *bins = counts.args
        return _uncast(ids) if bins == [groups, 0, groups - 1] else None
    if (sums := added(counts)) is not None:
        return _uncast(sums.at) if is_zero(sums.table) and is_one(sums.values) else None
    if counts.target is aten.sum.dim_IntList and [*counts.args[1]] == [0] and len(counts.args) < 3:
        return _compared(_uncast(counts.args[0]), groups)
    return None


def _compared(equal: Any, groups: int) -> fx.Node | None:
    """The ids in ``ids[:, None] == arange(groups)``, as ``one_hot`` is computed."""
    if equal.target is not aten.eq.Tensor:
        return None
    ids, each = equal.args
    if counted(each) is None or VAL.of(each).numel() != groups or VAL.of(ids).shape[1:] != (1,):
        return None
    return list_of(ids)


def _uncast(node: Any) -> Any:
    """A value before casts to dtypes that hold numbers of rows."""
    while node.target is aten._to_copy.default and VAL.of(node).dtype in _EXACT:
        node = node.args[0]
    return node
