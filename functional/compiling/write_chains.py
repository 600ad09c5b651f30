"""Chains of functional writes that may be done in one memory, and the order in which that is right.

A write (`index_put`, `scatter`, `select_scatter`, ...) returns its base with some elements replaced. If
nothing reads the base afterwards, the result may be in the base's memory. A `Chain` is a value and the
writes that follow one another in its memory: that of a donated input, or of a copy of another value. A
write joins a chain if its base is all of the memory, laid out as the result is, and if all that reads
what the memory holds (the base, or views of it) runs before the write. A reader that comes later and
does not depend on the write is moved before it; one that does depend on it, or the graph's result, is
the end of the chain.

A write into a view is written into what it is a view of: `c[1][:, 3] = x` is a write into `c[1]`, whose
result is written into `c`. In the memory of `c`, the second has nothing to do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.effects.in_place import SCATTERS, WRITTEN_VIEWS
from torchard.functional.programs.graphs import output_node
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import is_dense, is_view
from torchard.functional.torch_internals.operators import COLLECTIVES, aten, c10d, prims

__all__ = ["Chain", "ChainedWrite", "chains", "operand_of"]

# The writes to elements at indices that Inductor does in place.
_NAMES = ("aten.index_put", "aten._unsafe_index_put", "aten.scatter")
_INDEXED = frozenset(op for op in SCATTERS if str(op).startswith(_NAMES))
_PLACED = (aten.select_scatter.default, aten.slice_scatter.default)
# Other shapes of the same elements in the same order.
_RESHAPES = (
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)


@dataclass
class ChainedWrite:
    """A write, and the writes of its result into what its base is a view of.

    Attributes:
        steps: these writes, the innermost first: in place, the others have nothing to do.
        views: the views that lead from ``base`` to the base of the first step.
        base: what is written into.
        value: the result: that of the last step, or a view of all of it.
    """

    steps: list[fx.Node]
    views: list[fx.Node]
    base: fx.Node
    value: fx.Node

    @property
    def first(self) -> fx.Node:
        """The innermost step."""
        return self.steps[0]


@dataclass(eq=False)
class Chain:
    """Writes that follow one another in one memory.

    Attributes:
        start: what the memory holds at first.
        donated: whether that is an input whose memory may be written; else it is copied.
        values: what lies in the memory after the last write.
    """

    start: fx.Node
    donated: bool
    values: set[fx.Node] = field(default_factory=set)
    writes: list[ChainedWrite] = field(default_factory=list)

    @property
    def is_returned(self) -> bool:
        """Whether the graph returns what lies in the memory."""
        output = output_node(self.start.graph)
        return any(output in value.users for value in self.values)


def chains(graph: fx.Graph, donated: Iterable[fx.Node]) -> list[Chain]:
    """The chains of a graph, whose operations are moved so that each of their writes may be in place."""
    return _Search(graph, donated).all()


class _Search:
    """The search for chains, in the order of the graph."""

    def __init__(self, graph: fx.Graph, donated: Iterable[fx.Node]) -> None:
        self.graph = graph
        self.chains = [Chain(start, donated=True) for start in donated]
        # The chain in whose memory a value lies, if that is after the chain's last write.
        self.chain_of: dict[fx.Node, Chain] = {}
        for chain in self.chains:
            self._hold(chain, [chain.start])
        # By a write, what reads the memory before it.
        self.readers: dict[fx.Node, set[fx.Node]] = {}
        self._number()

    def _number(self) -> None:
        self.number = {node: i for i, node in enumerate(self.graph.nodes)}

    def _hold(self, chain: Chain, values: Iterable[fx.Node]) -> None:
        for value in chain.values:
            del self.chain_of[value]
        chain.values = _aliases(values)
        self.chain_of.update(dict.fromkeys(chain.values, chain))

    def all(self) -> list[Chain]:
        """The chains that have writes."""
        done: set[fx.Node] = set()
        for node in list(self.graph.nodes):
            if node in done or not (node.target in _PLACED or node.target in _INDEXED):
                continue
            write = _write(node)
            done.update(write.steps)
            if not _is_possible(write):
                continue
            chain = self.chain_of.get(write.base)
            if chain is None or not self._joins(chain, write):
                self.chains.append(Chain(write.base, donated=False))
                self._add(self.chains[-1], write, set())
        return [chain for chain in self.chains if chain.writes]

    def _joins(self, chain: Chain, write: ChainedWrite) -> bool:
        """Add a write to a chain if it may be in place."""
        readers = {user for value in chain.values for user in value.users}.difference(write.steps)
        joins = _is_whole(chain, write.base) and self._run_before(write.first, readers)
        if joins:
            self._add(chain, write, readers)
        return joins

    def _add(self, chain: Chain, write: ChainedWrite, readers: set[fx.Node]) -> None:
        self.readers[write.first] = readers
        chain.writes.append(write)
        self._hold(chain, write.steps)

    def _run_before(self, write: fx.Node, readers: set[fx.Node]) -> bool:
        """Have readers run before a write; False if they cannot."""
        at = self.number[write]
        later = [reader for reader in readers if self.number[reader] > at]
        if not later:
            return True
        moved, stack = set(later), list(later)
        while stack:
            node = stack.pop()
            for needed in (*node.all_input_nodes, *self.readers.get(node, ())):
                if self.number[needed] >= at and needed not in moved:
                    moved.add(needed)
                    stack.append(needed)
        # The order of collectives is that of the other ranks.
        if write in moved or any(node.op == "output" or _communicates(node) for node in moved):
            return False
        for node in sorted(moved, key=self.number.__getitem__):
            write.prepend(node)
        self._number()
        return True


def _write(node: fx.Node) -> ChainedWrite:
    """The write that begins with this one."""
    write = ChainedWrite([node], [], operand_of(node), node)
    while (outer := _outer(write.value, write.base)) is not None:
        if outer.target in _PLACED:
            write.steps.append(outer)
        write.views.insert(0, write.base)
        write.value, write.base = outer, operand_of(write.base)
    return write


def operand_of(node: fx.Node) -> fx.Node:
    """What a view is of, or a write is into."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _outer(value: fx.Node, base: fx.Node) -> fx.Node | None:
    """What a value, written over its base, becomes of what the base is a view of, if it is a view."""
    if not is_view(base) or not isinstance(base.args[0], fx.Node):
        return None
    users = [user for user in value.users if _is_written_back(user, value, base)]
    return users[0] if users else None


def _is_written_back(user: fx.Node, value: fx.Node, base: fx.Node) -> bool:
    """Whether a user of a value does with it the inverse of what made its base."""
    whole = operand_of(base)
    if user.target in _PLACED:
        return bool(user.args[:2] == (whole, value)) and _is_place(base, user)
    if user.args[0] is not value:
        return False
    if user.target in _RESHAPES and base.target in _RESHAPES:
        return VAL.of(user).shape == VAL.of(whole).shape and _share_storage(base, whole)
    if user.target is base.target is aten.permute.default:
        order: Any = base.args[1]
        back: Any = user.args[1]
        rank = len(order)
        return [order[d % rank] % rank for d in back] == list(range(rank))
    return False


def _is_place(base: fx.Node, write: fx.Node) -> bool:
    """Whether a value is the view that is written by a write into the value's own base."""
    have, want = VAL.of(base), _written(write)
    return (have.shape, have.stride(), have.storage_offset()) == (
        *(want.shape, want.stride(), want.storage_offset()),
    )


def _written(write: fx.Node) -> torch.Tensor:
    """The view of a write's base that is written."""
    with internals.no_modes(), torch.no_grad():
        view: torch.Tensor = WRITTEN_VIEWS[write.target](
            VAL.of(operand_of(write)), *write.args[2:], **write.kwargs
        )
    return view


def _share_storage(one: fx.Node, other: fx.Node) -> bool:
    return internals.storage_id(VAL.of(one)) == internals.storage_id(VAL.of(other))


def _is_possible(write: ChainedWrite) -> bool:
    """Whether a write can be in place, if nothing reads its base afterwards."""
    value, first = VAL.of(write.value), write.first
    if value.is_complex() or not is_dense(value) or value.stride() != VAL.of(write.base).stride():
        return False
    if first.target in _PLACED:
        value_written: Any = first.args[1]
        part, source = _written(first), VAL.of(value_written)
        if (part.shape, part.dtype) != (source.shape, source.dtype) or (
            part.numel() == VAL.of(first).numel()  # a copy
        ):
            return False
    # What else reads a step's result expects its strides.
    inner = [step for step in write.steps if step is not write.value]
    return all(
        len(step.users) == 1 or VAL.of(step).stride() == VAL.of(operand_of(step)).stride()
        for step in inner
    )


def _is_whole(chain: Chain, base: fx.Node) -> bool:
    """Whether a value in the memory of a chain is all that is in it, as it is or in another shape."""
    held = {chain.start, *(step for write in chain.writes[-1:] for step in write.steps)}
    size = VAL.of(chain.start).numel()
    while base not in held:
        reshaped = base.target in _RESHAPES and _share_storage(base, operand_of(base))
        if not reshaped and base.target is not aten.permute.default:
            return False
        base = operand_of(base)
    return bool(VAL.of(base).numel() == size)


def _aliases(values: Iterable[fx.Node]) -> set[fx.Node]:
    """Values, and those that may lie in their memory, or that are computed from it until awaited."""
    found = set(values)
    stack = list(found)
    while stack:
        value = stack.pop()
        for user in value.users:
            if user not in found and _shares(user, value):
                found.add(user)
                stack.append(user)
    return found


def _shares(user: fx.Node, value: fx.Node) -> bool:
    """Whether a user's result may lie in an operand's memory."""
    if user.target is prims.convert_element_type.default:
        return bool(VAL.of(user).dtype == VAL.of(value).dtype)  # Inductor returns the operand
    issues = _communicates(user) and user.target is not c10d.wait_tensor.default
    return is_view(user) or user.target is operator.getitem or issues


def _communicates(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == COLLECTIVES
