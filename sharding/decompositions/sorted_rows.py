"""Rows that are sorted by group, in blocks: each rank sorts its own rows.

Experts are computed on tokens that are sorted by expert, and then put back in their places. Sorting moves
every token, although no result depends on the order within it: each row is computed by itself, sums over
rows do not depend on their order, and products of groups need their groups' rows adjacent. So rows may as
well be sorted within blocks, one for each rank or microbatch; groups then have a run in each block.

`in_blocks` rewrites a sort, and all that reads its order, if that is true of every operation between:

- **sorted** values have a row for each sorted position. Operations on them may be split along this dim
  in any way, and read no other value along it: that follows from their factor rules.
- the order is only used to take rows of other values (``x[order]``, ``x[order // k]``), to add rows to
  others', to put rows back (``y[inverse]``), and to count the rows of each group.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from torchard.functional.effects.grouped_products import GROUPED_MM, GROUPED_OUTER
from torchard.functional.programs.constants import is_zero
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.decompositions.decompose import replaced_by, stand_in
from torchard.sharding.decompositions.row_by_row import NotRows, dim_of_rows, factor_of_rows
from torchard.sharding.decompositions.row_moves import added, counted_by, list_of, placed, taken
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.data_movement.counting import counted
from torchard.sharding.rules.registry import result_index

__all__ = ["begin_where_others_end", "in_blocks", "sorts"]

_T = TypeVar("_T")
_INTEGERS = (torch.int16, torch.int32, torch.int64)
_SORTS = (aten.sort.default, aten.sort.stable)


def sorts(graph: fx.Graph) -> list[fx.Node]:
    """The sorts of a list of integers, with its order."""
    return [n for n in graph.nodes if n.target in _SORTS and _is_list_of_groups(n)]


def _args(node: fx.Node) -> Any:
    return node.args


def _is_list_of_groups(node: fx.Node) -> bool:
    (ids,) = node.all_input_nodes
    is_order = ids.target is operator.getitem and ids.all_input_nodes[0].target in _SORTS
    fits = VAL.of(ids).ndim == 1 and VAL.of(ids).dtype in _INTEGERS
    return fits and not _is_descending(node) and not is_order


def _is_descending(sort: fx.Node) -> bool:
    return bool((*sort.args, *[None] * 3)[2] or sort.kwargs.get("descending", False))


def in_blocks(graph: fx.Graph, sort: fx.Node, count: int) -> bool:
    """Sort in blocks, as many as ``count``, if no result depends on that; whether it was done."""
    region = _Region(sort, count)
    if not region.holds(graph):
        return False
    region.rewrite(graph)
    graph.eliminate_dead_code()
    return True


@dataclass(frozen=True)
class _Order:
    """What a value says of the order: ``each`` positions share a row, or it is the inverse."""

    each: int = 1
    inverse: bool = False


class _Region:
    """The values that depend on a sort's order.

    Attributes:
        orders: values that say where rows come from or go to.
        dims: of each sorted value, the dim of sorted positions; of a tuple, of each of its results.
        edits: the nodes that read the order, and how each is replaced.
        values: the sort's first result.
        counted: the ids in any order: their histogram counts the rows of each group.
    """

    def __init__(self, sort: fx.Node, count: int) -> None:
        self.sort, self.count = sort, count
        (self.ids,) = sort.all_input_nodes
        (self.size,) = VAL.of(self.ids).shape
        self.rows = self.size // count
        self.orders: dict[fx.Node, _Order] = {}
        self.dims: dict[fx.Node, Any] = {}
        self.inverses: set[fx.Node] = set()
        self.edits: list[tuple[fx.Node, _Edit]] = []
        self.values: fx.Node | None = None
        self.counted = {self.ids}

    def holds(self, graph: fx.Graph) -> bool:
        """Whether no result depends on the order."""
        if self.size % self.count or self.count < 2:
            return False
        try:
            for node in graph.nodes:
                if node.op == "call_function":
                    self._visit(node)
            results = output_values(graph)
            products = any(n.target in (GROUPED_MM, GROUPED_OUTER) for n, _ in self.edits)
            return products and not any(map(self._known, results))
        except NotRows:
            return False

    def _visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._item(node)
        elif any(map(self._known, node.all_input_nodes)):
            handler = _HANDLERS.get(node.target, _Region._by_rule)
            handler(self, node)

    def _item(self, node: fx.Node) -> None:
        source = node.all_input_nodes[0]
        if source is self.sort:
            if node.args[1] == 0:
                self.values, self.dims[node] = node, 0
                self.counted.add(node)
            else:
                self.orders[node] = _Order()
        elif source in self.inverses:
            self._need(bool(node.args[1] == 1))
            self.orders[node] = _Order(inverse=True)
        elif source in self.dims and (dim := self.dims[source][result_index(node)]) is not None:
            self.dims[node] = dim

    # -- operations that read the order ----------------------------------------------------------------

    def _divided(self, node: fx.Node) -> None:
        """``order // k``: k positions for each row."""
        order, each = _args(node)
        if order not in self.orders:
            return self._by_rule(node)
        self._need(self.orders[order] == _Order() and isinstance(each, int) and each > 0)
        self._need(self.rows % each == 0)
        self.orders[node] = _Order(each)

    def _taken(self, node: fx.Node) -> None:
        """``x[order]``: rows of a value become sorted; ``y[inverse]``: they are put back."""
        if not self._reads_order(node):
            return self._by_rule(node)
        x, at = self._found(taken(node))
        order = self._found(self.orders.get(at))
        if order.inverse:
            self._need(self.dims.get(x) == 0)
        else:
            self._need(not self._known(x) and VAL.of(x).shape[0] * order.each == self.size)
            self.dims[node] = 0
            if x is self.ids:
                self.counted.add(node)
        self.edits.append((node, _take(order)))

    def _placed(self, node: fx.Node) -> None:
        """The inverse of the order, or rows that are added to those of a value."""
        found = placed(node) if self._reads_order(node) else None
        if found is None:
            return self._added(node)
        table, at, values = found
        shapes = {tuple(VAL.of(x).shape) for x in (values, table)}
        self._need(self.orders.get(at) == _Order() and shapes == {(self.size,)})
        self._need(counted(values) == 0 and not self._known(table))
        self.orders[node] = _Order(inverse=True)

    def _added(self, node: fx.Node) -> None:
        """Rows that are added to those of a value."""
        if not self._reads_order(node):
            return self._by_rule(node)
        table, at, values = self._found(added(node))
        order, shape = self._found(self.orders.get(at)), VAL.of(table).shape
        self._need(VAL.of(values).shape == (self.size, *shape[1:]) and is_zero(table))
        self._need(shape[0] * order.each == self.size)
        if order.inverse:
            self._need(not self._known(values))
            self.dims[node] = 0
        else:
            self._need(self.dims.get(values) == 0)
        self.edits.append((node, _add(order)))

    def _repeated(self, node: fx.Node) -> None:
        """The order, for each element of a row."""
        if not self._reads_order(node):
            return self._by_rule(node)
        self.orders[node] = self._found(self.orders.get(self._found(list_of(node))))

    def _product(self, node: fx.Node) -> None:
        """A product of groups of sorted rows, with the matrix of each, or with rows."""
        x, other, begins, ends, _ = _args(node)
        outer = node.target is GROUPED_OUTER
        of_other = self.dims.get(other) == 0 if outer else not self._known(other)
        self._need(self.dims.get(x) == 0 and of_other and self._counts(begins, ends))
        if not outer:
            self.dims[node] = 0
        self.edits.append((node, _multiply))

    def _inverted(self, node: fx.Node) -> None:
        """The order of the order is its inverse."""
        self._need(self.orders.get(_args(node)[0]) == _Order() and not _is_descending(node))
        self.inverses.add(node)

    def _counted(self, node: fx.Node) -> None:
        """A histogram is the same in any order."""
        self._need(_args(node)[0] in self.dims)

    def _counts(self, begins: Any, ends: Any) -> bool:
        """Whether these are the places of the groups among all sorted rows."""
        ids = counted_by(ends)
        return ids in self.counted and len(VAL.of(ends)) > 1 and begin_where_others_end(begins, ends)

    # -- all others ------------------------------------------------------------------------------------

    def _by_rule(self, node: fx.Node) -> None:
        """An operation on each sorted row by itself, or a reduction over them."""
        call = Call.of(node)
        rule = rule_of(call)
        factor = factor_of_rows(call, rule, self.dims)
        self._need(not self._reads_order(node))
        for operand, dims in zip(call.operands, rule.ins, strict=True):
            beside = [i for i, dim in enumerate(dims) if factor in dim and operand not in self.dims]
            self._need(all(_is_same_along(operand, i) for i in beside))
        found = [self._dim_of(dims, factor, rule.combiner) for dims in rule.outs]
        if isinstance(VAL.of(node), (tuple, list)):
            self.dims[node] = found
        elif found[0] is not None:
            self.dims[node] = found[0]

    def _dim_of(self, dims: Any, factor: int, combiner: Any) -> int | None:
        dim = dim_of_rows(dims, factor)
        self._need(dim is not None or factor in combiner)
        return dim

    def _found(self, value: _T | None) -> _T:
        if value is None:
            raise NotRows
        return value

    def _reads_order(self, node: fx.Node) -> bool:
        return any(n in self.orders for n in node.all_input_nodes)

    def _known(self, node: Any) -> bool:
        return node in self.dims or node in self.orders

    def _need(self, condition: bool) -> None:
        if not condition:
            raise NotRows

    def rewrite(self, graph: fx.Graph) -> None:
        """Replace the sort, and what reads its order."""
        count = self.count

        def in_each(ids: torch.Tensor) -> Any:
            values, order = ids.reshape(count, -1).sort(1)
            return values.reshape(-1), values, order, order.sort(1)[1]

        flat, groups, order, back = replaced_by(graph, self.sort, in_each, [self.ids])
        blocks = _Blocks(graph, count, groups, order, back)
        if self.values is not None:
            stand_in(flat, self.values)
        for node, edit in self.edits:
            stand_in(edit(node, blocks), node)


# -- replacements ---------------------------------------------------------------------------------


@dataclass
class _Blocks:
    """The values of a sort in blocks, each [count, rows]: groups, order, its inverse.

    Attributes:
        places: begins and ends of groups, [count, groups], once there are any.
    """

    graph: fx.Graph
    count: int
    groups: fx.Node
    order: fx.Node
    inverse: fx.Node
    places: list[fx.Node] | None = None

    def replace(self, node: fx.Node, fn: Callable[..., Any], operands: Sequence[Any]) -> fx.Node:
        return replaced_by(self.graph, node, fn, operands)[0]

    def within(self, order: _Order) -> fx.Node:
        return self.inverse if order.inverse else self.order

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """A value with its rows in blocks."""
        return x.reshape(self.count, len(x) // self.count, *x.shape[1:])

    def at(self, order: torch.Tensor, each: int) -> list[torch.Tensor]:
        """The index of a block's rows: each block reads its own."""
        block = torch.arange(self.count, device=order.device)[:, None]
        return [block, order if each == 1 else order // each]


_Edit = Callable[[fx.Node, _Blocks], fx.Node]


def _take(order: _Order) -> _Edit:
    """Rows of a value in another order."""

    def edit(node: fx.Node, blocks: _Blocks) -> fx.Node:
        def fn(x: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
            taken = aten.index.Tensor(blocks.split(x), blocks.at(within, order.each))
            rows: torch.Tensor = taken.reshape(-1, *x.shape[1:])
            return rows

        found = taken(node)  # its operands may have been replaced since it was visited
        assert found is not None
        return blocks.replace(node, fn, [found.x, blocks.within(order)])

    return edit


def _add(order: _Order) -> _Edit:
    """Rows that are added to zeros in another order."""

    def edit(node: fx.Node, blocks: _Blocks) -> fx.Node:
        shape = VAL.of(node).shape

        def fn(values: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
            at, rows = blocks.at(within, order.each), blocks.split(values)
            each = blocks.count, shape[0] // blocks.count, *shape[1:]
            zeros = torch.zeros(each, dtype=values.dtype, device=values.device)
            added = aten.index_put.default(zeros, at, rows, True)
            total: torch.Tensor = added.reshape(shape)
            return total

        found = added(node)
        assert found is not None
        return blocks.replace(node, fn, [found.values, blocks.within(order)])

    return edit


def _multiply(node: fx.Node, blocks: _Blocks) -> fx.Node:
    """A product with the groups' places in each block."""
    op: Any = node.target
    x, other, _, _, groups = _args(node)
    if blocks.places is None:

        def places(ids: torch.Tensor) -> Any:
            each = torch.arange(groups, dtype=ids.dtype, device=ids.device)
            each = each.expand(blocks.count, -1).contiguous()
            first = torch.searchsorted(ids, each[:, :1].contiguous())
            ends = (torch.searchsorted(ids, each, right=True) - first).to(torch.int32)
            return torch.nn.functional.pad(ends[:, :-1], (1, 0)), ends

        blocks.places = replaced_by(blocks.graph, node, places, [blocks.groups])

    def fn(x: Any, other: Any, begins: Any, ends: Any) -> Any:
        return op(x, other, begins, ends, groups)

    return blocks.replace(node, fn, [x, other, *blocks.places])


def _is_same_along(node: fx.Node, dim: int) -> bool:
    """Whether a value has the same at all indices of a dim: it is filled, or expanded along the dim."""
    if node.target is aten.full.default or is_zero(node):
        return True
    if node.target in (aten._to_copy.default, aten.clone.default, aten.alias.default):
        return _is_same_along(node.all_input_nodes[0], dim)
    if node.target is not aten.expand.default:
        return False
    (source,) = node.all_input_nodes
    shape = VAL.of(source).shape
    at = dim - (VAL.of(node).ndim - len(shape))
    return at < 0 or shape[at] == 1 or _is_same_along(source, at)


def begin_where_others_end(begins: Any, ends: fx.Node) -> bool:
    """Whether these are the begins of groups of which the first begins at 0."""
    before, pad, *filled = begins.args if begins.target is aten.constant_pad_nd.default else (ends, ())
    if [*pad] != [1, 0] or any(filled) or before.target is not aten.slice.Tensor:
        return False
    source, *place = before.args
    return source is ends and place[:2] == [0, 0] and len(VAL.of(before)) == len(VAL.of(ends)) - 1


_HANDLERS: dict[Any, Callable[[_Region, fx.Node], None]] = {
    aten.floor_divide.default: _Region._divided,
    **dict.fromkeys(
        (aten.index.Tensor, aten.index_select.default, aten.gather.default), _Region._taken
    ),
    **dict.fromkeys((aten.index_put.default, aten.scatter.src), _Region._placed),
    **dict.fromkeys((aten.index_add.default, aten.scatter_add.default), _Region._added),
    **dict.fromkeys(
        (aten.unsqueeze.default, aten.expand.default, aten.view.default), _Region._repeated
    ),
    aten.histc.default: _Region._counted,
    **dict.fromkeys(_SORTS, _Region._inverted),
    GROUPED_MM: _Region._product,
    GROUPED_OUTER: _Region._product,
}
