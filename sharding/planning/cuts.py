"""Grouping of the rows and slices that are read from one value.

If most rows of a value are read, one operation for all rows is cheapest; if few are, one operation per
row. Slices that tile a dim are exchanged at once. So programs are rewritten: to ``unbind`` if most rows
are read, ``select`` if few are, ``split`` if slices tile a dim, and ``slice`` if some are not needed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.graphs import Inserter, substitute
from torchard.functional.programs.tagging import inherited_tags
from torchard.functional.programs.tags import ORIGIN, SCOPE, SOURCE, VAL
from torchard.functional.torch_internals.operators import aten

__all__ = ["gather_cuts"]


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
# Tags that may differ between nodes that are merged.
_WHERE = (SOURCE, SCOPE, ORIGIN)


def gather_cuts(graph: fx.Graph) -> None:
    """Group rows and slices of each value; changes the graph in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.unbind.int:
            _only_read(graph, node, _row, most=len(VAL.of(node)) // 2)
        elif node.op == "call_function" and node.target in _SPLITS:
            _only_read(graph, node, _slice, most=len(VAL.of(node)) - 1)
    for group in _groups(graph, aten.select.int, _rows):
        _join_rows(group)
    for group in _groups(graph, aten.slice.Tensor, _ends):
        _join_slices(group)


# -- operations with few results read -----------------------------------------------------------------

Cut = tuple[Any, tuple[Any, ...]]  # an operation and its arguments, after the value


def _row(node: fx.Node, position: int) -> Cut:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return aten.select.int, (dim, position)


def _slice(node: fx.Node, position: int) -> Cut:
    dim = _dim_of(node, 2)
    sizes = [v.shape[dim] for v in VAL.of(node)]
    start = sum(sizes[:position])
    return aten.slice.Tensor, (dim, start, start + sizes[position])


def _only_read(graph: fx.Graph, node: fx.Node, cut: Callable[..., Cut], most: int) -> None:
    """Replace an operation of which at most ``most`` results are read by one operation per result."""
    positions = {user.args[1] for user in node.users}
    if any(u.target is not operator.getitem for u in node.users) or len(positions) > most:
        return
    for user in list(node.users):
        target, args = cut(node, user.args[1])
        substitute(user, _insert(user, target, (node.args[0], *args), VAL.of(user)))
    graph.erase_node(node)


# -- slices of one value ---------------------------------------------------------------------


def _dim_of(node: fx.Node, at: int = 1) -> int:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim: Any = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
    rank: int = VAL.of(source).ndim
    return int(dim) % max(rank, 1)


def _rows(node: fx.Node) -> int | None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    index: Any = node.args[2]
    return int(index) % int(VAL.of(source).shape[_dim_of(node)])


def _ends(node: fx.Node) -> tuple[int, int] | None:
    """The start and stop of a slice with step 1; None for other nodes."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    args: list[Any] = [*node.args, *[None, 0, None, None, 1][len(node.args) :]]
    _, _, start, stop, step = args
    size = VAL.of(source).shape[_dim_of(node)]
    first, last, _ = slice(start, stop).indices(size)
    return (first, last) if step == 1 and first < last and not node.kwargs else None


CutGroup = list[tuple[Any, fx.Node]]


def _groups(graph: fx.Graph, target: Any, place: Callable[[fx.Node], Any]) -> Iterable[CutGroup]:
    """Groups of the selections along one dim of one value, with the position of each selection."""
    groups: dict[Hashable, CutGroup] = {}
    for node in graph.find_nodes(op="call_function", target=target):
        at = place(node)
        if at is not None:
            tags = tuple((t, repr(v)) for t, v in inherited_tags(node).items() if t not in _WHERE)
            groups.setdefault((node.args[0], _dim_of(node), tags), []).append((at, node))
    return groups.values()


def _join_rows(group: CutGroup) -> None:
    """Replace selections of most rows of a value by one unbind."""
    node = group[0][1]
    source, dim = node.args[0], _dim_of(node)
    val: torch.Tensor = VAL.of(source)  # type: ignore[arg-type]
    if 2 * len({at for at, _ in group}) > val.shape[dim] > 1:
        whole = _insert(node, aten.unbind.int, (source, dim), tuple(val.unbind(dim)))
        _take(whole, group)


def _join_slices(group: CutGroup) -> None:
    """Replace slices that tile a dim by one split."""
    node = group[0][1]
    source, dim = node.args[0], _dim_of(node)
    val: torch.Tensor = VAL.of(source)  # type: ignore[arg-type]
    cuts = sorted({at for at, _ in group})
    tiles = all(left[1] == right[0] for left, right in itertools.pairwise(cuts))
    if len(cuts) < 2 or not tiles or (cuts[0][0], cuts[-1][1]) != (0, val.shape[dim]):
        return
    sizes = [stop - start for start, stop in cuts]
    args = (source, sizes, dim)
    whole = _insert(node, aten.split_with_sizes.default, args, tuple(val.split(sizes, dim)))
    _take(whole, [(cuts.index(at), cut) for at, cut in group])


def _take(whole: fx.Node, group: Sequence[tuple[int, fx.Node]]) -> None:
    for position, node in group:
        substitute(node, _insert(node, operator.getitem, (whole, position), VAL.of(node)))


def _insert(at: fx.Node, target: Any, args: tuple[Any, ...], val: Any) -> fx.Node:
    """Insert a node before ``at``, with its tags; a label only if the node has the value of ``at``."""
    several = target is aten.unbind.int or target in _SPLITS
    return Inserter(at)(target, *args, val=val, same="place" if several else "value")
