"""Products of groups whose matrices are split: rows go to the owner of their group's matrix, and back.

Experts that are split over ranks are computed where they are: each rank takes all rows, multiplies those
of its own experts, and at the end rows are added up over ranks. Between products, each operation on rows
has only to be right for the rows of a rank's own groups, so nothing is sent until rows are read across
ranks. If tokens are split over the same ranks, they are gathered before the first product and their sums
are scattered after the last, as in Megatron-LM's all_gather dispatcher of tokens. Shapes are static: a
rank has room for all rows, and multiplies only its own.

`by_owner` rewrites a graph so. Products get a leading dim of owners, which the ranks split, and so does
each operation on their rows that computes each row by itself, up to the operations that do not: these
read the sum over owners, of which each contributes its own rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.effects.grouped_products import GROUPED_MM, GROUPED_OUTER
from torchard.functional.programs.graphs import with_operands
from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import VAL
from torchard.sharding.decompositions.decompose import replaced_by, stand_in
from torchard.sharding.decompositions.row_by_row import NotRows, dim_of_rows, factor_of_rows
from torchard.sharding.decompositions.shared_values import (
    ROWS,
    Axes,
    Constraint,
    SharedValues,
    size_of,
)
from torchard.sharding.decompositions.sorted_rows import begin_where_others_end
from torchard.sharding.layouts.tags import CALL
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import result_index

__all__ = ["Axes", "Owners", "by_owner", "products"]

@dataclass(frozen=True)
class Owners:
    """The owners of a product's groups.

    Attributes:
        axes: the axes that split the groups.
        count: the number of owners.
        of_rows: the axes that split the rows.
    """

    axes: Axes
    count: int
    of_rows: Axes

    @property
    def have_rows(self) -> bool:
        """Whether each owner has all rows already."""
        return not set(self.axes) & set(self.of_rows)


@dataclass(frozen=True)
class _Groups:
    """The groups of products, and their owners."""

    begins: fx.Node
    ends: fx.Node
    owners: Owners

    def are_at(self, begins: fx.Node, ends: fx.Node) -> bool:
        """Whether these are the places of the groups; each product may have computed the begins anew."""
        return self.ends is ends and (self.begins is begins or begin_where_others_end(begins, ends))


@dataclass(frozen=True)
class _Owned:
    """A value with a leading dim of owners.

    Attributes:
        node: the value; its parts are right for the rows of each owner's groups.
        dim: the dim of rows of the value that it stands for.
        is_zero: whether all other rows are zero.
    """

    node: fx.Node
    groups: _Groups
    dim: int
    is_zero: bool


def products(graph: fx.Graph) -> list[fx.Node]:
    """The products of rows with the matrices of their groups."""
    return [n for n in graph.nodes if n.target is GROUPED_MM and VAL.of(n.args[0]).ndim == 2]


def by_owner(
    graph: fx.Graph, owners: Mapping[fx.Node, Owners], apart: Container[fx.Node] = ()
) -> dict[fx.Node, Constraint]:
    """Give products owners.

    Args:
        apart: operations that have no owners, but read sums over them.

    Returns:
        The nodes that constrain values: all owners must have them, or split them among them.
    """
    region = _Region(graph, owners, apart)
    for node in list(graph.nodes):
        region.visit(node)
    graph.eliminate_dead_code()
    return {node: constraint for node, constraint in region.shared.constraints.items() if node.users}


class _Region:
    """The values that have owners.

    Attributes:
        apart: as of `by_owner`.
        known: the groups that have owners.
        ahead: the nodes that depend on products, and are still to be visited.
        owned: each value that has owners.
        tuples: of each tuple whose results have owners, these results.
        sums: the sums over owners.
        owner_of: of groups, the owner of each row.
        shared: the values that all owners have.
    """

    def __init__(
        self, graph: fx.Graph, owners: Mapping[fx.Node, Owners], apart: Container[fx.Node]
    ) -> None:
        self.graph, self.owners, self.apart = graph, owners, apart
        self.known: list[_Groups] = []
        self.ahead: set[fx.Node] = set()
        for node in graph.nodes:
            if node in owners or not self.ahead.isdisjoint(node.all_input_nodes):
                self.ahead.add(node)
        self.owned: dict[fx.Node, _Owned] = {}
        self.tuples: dict[fx.Node, list[_Owned]] = {}
        self.sums: dict[fx.Node, fx.Node] = {}
        self.owner_of: dict[_Groups, fx.Node] = {}
        self.shared = SharedValues(graph)

    def visit(self, node: fx.Node) -> None:
        """Give a node owners, or let it read sums."""
        if node.target is operator.getitem and node.all_input_nodes[0] in self.tuples:
            self.owned[node] = self.tuples[node.all_input_nodes[0]][result_index(node)]
        elif node.target is GROUPED_MM and (groups := self._groups(node)):
            self._product(node, groups)
        elif node.target is GROUPED_OUTER and (groups := self._groups(node)):
            self._outer(node, groups)
        elif not self.owned.keys().isdisjoint(node.all_input_nodes) and not self._row_by_row(node):
            self._read_sums(node)
        self.ahead.discard(node)

    # -- products --------------------------------------------------------------------------------------

    def _groups(self, node: fx.Node) -> _Groups | None:
        """The groups of a product that has owners: its matrices are split, or another's of the groups."""
        *_, begins, ends, _ = _args(node)
        known = next((groups for groups in self.known if groups.are_at(begins, ends)), None)
        if known is None and (owners := self.owners.get(node)):
            known = _Groups(begins, ends, owners)
            self.known.append(known)
        return known

    def _product(self, node: fx.Node, groups: _Groups) -> None:
        x, w, *_, size = _args(node)

        def fn(x: torch.Tensor, w: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor) -> Any:
            each = w.reshape(groups.owners.count, -1, *w.shape[1:])
            return GROUPED_MM(x, each, *_of_owners(groups.owners.count, begins, ends), size)

        rows = self._with_owners(x, groups, node)
        (product,) = replaced_by(self.graph, node, fn, [rows, w, *self._places(groups, node)])
        self.owned[node] = _Owned(product, groups, 0, is_zero=True)

    def _outer(self, node: fx.Node, groups: _Groups) -> None:
        x, y, *_, size = _args(node)

        def fn(x: torch.Tensor, y: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor) -> Any:
            product = GROUPED_OUTER(x, y, *_of_owners(groups.owners.count, begins, ends), size)
            return product.flatten(0, 1)

        rows = [self._with_owners(operand, groups, node) for operand in (x, y)]
        (product,) = replaced_by(self.graph, node, fn, [*rows, *self._places(groups, node)])
        stand_in(product, node)

    def _with_owners(self, x: fx.Node, groups: _Groups, user: fx.Node) -> fx.Node:
        """The rows for each owner: its own, or those that all have, which ranks then need whole."""
        known = self.owned.get(x)
        if known and known.dim == 0 and known.groups == groups:
            return known.node
        rows = self._shared(self._sum(x, user) if known else x, groups.owners, user)
        return replaced_by(
            self.graph, user, lambda x: x.expand(groups.owners.count, *x.shape), [rows]
        )[0]

    def _places(self, groups: _Groups, user: fx.Node) -> list[fx.Node]:
        return [self._shared(at, groups.owners, user) for at in (groups.begins, groups.ends)]

    def _shared(self, node: fx.Node, owners: Owners, user: fx.Node) -> fx.Node:
        return self.shared.read(node, owners.axes, user, as_it_is=owners.have_rows)

    # -- operations on rows ----------------------------------------------------------------------------

    def _row_by_row(self, node: fx.Node) -> bool:
        """Give an operation owners, if it computes each row by itself."""
        if node.op == "output" or node in self.apart:
            return False
        call = Call.of(node)
        owned = {o: self.owned[o] for o in call.operands if o in self.owned}
        first, *others = owned.values()
        if any(each.groups != first.groups for each in others):
            return False
        try:
            dims, beside = _rows_of(call, {o: each.dim for o, each in owned.items()})
            nodes = {o: each.node for o, each in owned.items()}
            results = self._mapped(node, nodes, beside, first.groups.owners)
        except (NotRows, RuntimeError, NotImplementedError):  # the latter two: torch cannot map it
            return False
        with_owners = frozenset(k for k, o in enumerate(call.operands) if o in owned)
        linear = with_owners in rule_of(call).linear
        is_zero = linear and all(each.is_zero for each in owned.values())
        made = [
            _Owned(out, first.groups, dim, is_zero) for out, dim in zip(results, dims, strict=True)
        ]
        if isinstance(VAL.of(node), (tuple, list)):
            self.tuples[node] = made
        else:
            (self.owned[node],) = made
        return True

    def _mapped(
        self, node: fx.Node, owned: Mapping[fx.Node, fx.Node], shared: Container[fx.Node], owners: Owners
    ) -> list[fx.Node]:
        """The results of an operation for each owner.

        Args:
            owned: the operands that have owners, for each owner.
            shared: the operands that all owners must have.
        """
        operands = Call.of(node).operands
        in_dims = tuple(0 if o in owned else None for o in operands)

        def each(*values: torch.Tensor) -> Any:
            args, kwargs = with_operands(node, list(values))
            target: Any = node.target
            out = target(*args, **kwargs)
            return tuple(o for o in out if o is not None) if isinstance(out, (tuple, list)) else out

        read = [
            owned[o] if o in owned else self._shared(o, owners, node) if o in shared else o
            for o in operands
        ]
        mapped: Callable[..., Any] = torch.func.vmap(each, in_dims=in_dims)
        return replaced_by(self.graph, node, mapped, read)

    # -- sums over owners ------------------------------------------------------------------------------

    def _read_sums(self, node: fx.Node) -> None:
        """Let an operation read sums over owners, or be added up after it."""
        for operand in node.all_input_nodes:
            if operand in self.owned and not self._added_up_later(operand, node):
                node.replace_input_with(operand, self._sum(operand, node))
                forget(node, CALL)

    def _added_up_later(self, value: fx.Node, user: fx.Node) -> bool:
        """Add up the smallest value that linear operations make of a value; whether there is one."""
        path = [*self._linear(value, user)]
        least = min([value, *path], key=size_of)
        if least is value:
            return False
        owners = self.owned[value].groups.owners
        each, path = self._masked(self.owned[value], user), path[: path.index(least) + 1]
        for node, before in zip(path, [value, *path], strict=False):
            others = {n for n in node.all_input_nodes if n is not before}
            (each,) = self._mapped(node, {before: each}, others, owners)
        (total,) = replaced_by(self.graph, least, _total, [each])
        stand_in(total, least)
        if not owners.have_rows and VAL.of(least).ndim > 1 and any(n.target in ROWS for n in path):
            self.shared.split(total, owners.axes, owners.of_rows)
        return True

    def _linear(self, value: fx.Node, user: fx.Node) -> Iterator[fx.Node]:
        """The operations that a value goes through, each linear in the result of the one before."""
        while user.op == "call_function" and user not in self.apart:
            operands = Call.of(user).operands
            linear = rule_of(Call.of(user)).linear
            others = [o for o in operands if o is not value]
            is_one = len(others) == len(operands) - 1 and not isinstance(VAL.of(user), (tuple, list))
            if not is_one or frozenset({operands.index(value)}) not in linear:
                return
            if any(o in self.owned or o in self.ahead for o in others):
                return
            yield user
            if len(user.users) != 1:
                return
            value, (user,) = user, user.users

    def _sum(self, value: fx.Node, user: fx.Node) -> fx.Node:
        """The value that a value with owners stands for: of each row, that of its owner."""
        if value not in self.sums:
            each = self._masked(self.owned[value], user)
            (self.sums[value],) = replaced_by(self.graph, user, _total, [each], like=each)
        return self.sums[value]

    def _masked(self, owned: _Owned, user: fx.Node) -> fx.Node:
        """The value for each owner, with zeros in the rows of others."""
        if owned.is_zero:
            return owned.node

        def fn(x: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
            others = torch.arange(len(x), device=owner.device)[:, None] != owner
            shape = len(x), *[1] * owned.dim, -1, *[1] * (x.ndim - owned.dim - 2)
            return x.masked_fill(others.reshape(shape), 0)

        owner = self._owner(owned.groups, VAL.of(owned.node).shape[owned.dim + 1], user)
        return replaced_by(self.graph, user, fn, [owned.node, owner], like=owned.node)[0]

    def _owner(self, groups: _Groups, size: int, user: fx.Node) -> fx.Node:
        """The owner of each row; of rows of no group, that of the rows before them, or the first."""
        if groups in self.owner_of:
            return self.owner_of[groups]

        def fn(begins: torch.Tensor) -> torch.Tensor:
            blocks = begins.reshape(-1, begins.shape[-1])
            firsts = blocks[:, :: begins.shape[-1] // groups.owners.count][:, 1:].contiguous()
            rows = torch.arange(size // len(blocks), dtype=begins.dtype, device=begins.device)
            rows = rows.expand(len(blocks), -1).contiguous()
            return torch.searchsorted(firsts, rows, right=True).reshape(-1)

        begins, _ = self._places(groups, user)
        (self.owner_of[groups],) = replaced_by(self.graph, user, fn, [begins], like=begins)
        return self.owner_of[groups]


def _rows_of(call: Call, dims: Mapping[fx.Node, int]) -> tuple[list[int], set[fx.Node]]:
    """The dim of rows of each result, and the operands that have a value for each row.

    Args:
        dims: the dim of rows of some operands.

    Raises:
        NotRows: the operation does not compute each row by itself.
    """
    rule = rule_of(call)
    factor = factor_of_rows(call, rule, dims)
    found = [dim for of_dims in rule.outs if (dim := dim_of_rows(of_dims, factor)) is not None]
    if len(found) < len(rule.outs):
        raise NotRows
    operands = zip(call.operands, rule.ins, strict=True)
    return found, {operand for operand, of_dims in operands if (factor,) in of_dims}


def _of_owners(count: int, *places: torch.Tensor) -> list[torch.Tensor]:
    """The places of each owner's groups: [count, groups], or of blocks, [count, blocks, groups]."""
    each = [at.reshape(*at.shape[:-1], count, -1) for at in places]
    return [at if at.ndim == 2 else at.transpose(0, 1) for at in each]


def _total(x: torch.Tensor) -> torch.Tensor:
    """The sum over owners, of which one contributes each row."""
    if x.dtype == torch.bool:
        return x.to(torch.int8).sum(0, dtype=torch.int8).to(torch.bool)
    return x.sum(0, dtype=x.dtype)


def _args(node: fx.Node) -> Any:
    return node.args
