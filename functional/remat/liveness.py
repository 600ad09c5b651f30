"""Liveness: what a program holds while it runs, counted on the graph, each storage once.

The generated code drops every value after its last use (codegen.py), so what is alive at an operation is
known without running it: what has been made and is still to be read, the result of the operation among
it, arguments that the caller keeps, and what is returned.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from torchard.functional.programs.graphs import bytes_of
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import storage_of
from torchard.functional.remat.split import halves_of

__all__ = ["Liveness", "Storage", "bytes_in", "liveness", "order_of", "storage_key"]

# A value with a storage of its own: a node, and which of its results.
Storage = tuple[fx.Node, int]


@dataclass
class Liveness:
    """When each storage is alive.

    Attributes:
        order: the operations, as they run.
        made, last: of each storage, the places in the order where it is made (-1: before) and last read.
        size: of each storage, in bytes.
    """

    order: list[fx.Node]
    made: dict[Storage, int] = field(default_factory=dict)
    last: dict[Storage, int] = field(default_factory=dict)
    size: dict[Storage, int] = field(default_factory=dict)

    def held(self, without: Iterable[fx.Node] = ()) -> list[int]:
        """Bytes alive at each operation, its result among them; some values not counted."""
        skipped = set(without)
        change = [0] * (len(self.order) + 2)
        for storage, begin in self.made.items():
            if storage[0] in skipped:
                continue
            change[max(begin, 0)] += self.size[storage]
            change[self.last[storage] + 1] -= self.size[storage]
        found, now = [], 0
        for step in change[: max(len(self.order), 1)]:
            now += step
            found.append(now)
        return found

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return max(self.held())


def order_of(program: Program) -> list[fx.Node]:
    """The operations of a program as they run; of a joint program, those of its halves."""
    if any(leaf.role == "cotangent" for leaf in program.inputs):
        forward, backward = halves_of(program)
        return [*forward, *backward]
    return program.calls


def liveness(program: Program) -> Liveness:
    """What a program holds; of a joint program, its forward and then its backward.

    Over a mesh, sizes are those of the rank that holds most, and buffers of collectives do not count.
    """
    size = bytes_in(program)
    found = Liveness(order_of(program))
    end = len(found.order)
    donated = _donated(program)
    for leaf, node in zip(program.inputs, program.placeholders, strict=True):
        storage = node, 0
        found.made[storage], found.size[storage] = -1, size(node, 0)
        found.last[storage] = 0 if leaf.path.startswith(donated) else end
    for at, node in enumerate(found.order):
        for storage in _made_by(node):
            if storage not in found.made:
                found.made[storage], found.size[storage] = at, size(*storage)
                found.last[storage] = at
        for storage in _read_by(node):
            found.last[storage] = max(found.last[storage], at)
    for value in program.results:
        if isinstance(value, fx.Node):
            found.last[storage_key(value)] = end
    return found


def _made_by(node: fx.Node) -> Sequence[Storage]:
    """The storages an operation allocates."""
    if storage_key(node)[0] is not node:
        return []
    val = VAL.get(node)
    if isinstance(val, (tuple, list)):
        return [(node, i) for i, item in enumerate(val) if isinstance(item, torch.Tensor)]
    return [(node, 0)]


def _read_by(node: fx.Node) -> Iterable[Storage]:
    """What must be alive for a node; a tuple is, with all its items, until the last is taken out."""
    if node.target is operator.getitem:
        return _made_by(node.all_input_nodes[0]) or [storage_key(node)]
    return map(storage_key, node.all_input_nodes)


def storage_key(node: fx.Node) -> Storage:
    """Where a value lies: the node, and which of its results."""
    root = storage_of(node)
    if root.target is operator.getitem:
        whole, item = root.args
        assert isinstance(whole, fx.Node) and isinstance(item, int)
        return whole, item
    return root, 0


def _donated(program: Program) -> tuple[str, ...]:
    """What dies at its last use; arguments that a gradient is asked of are kept for it."""
    if any(leaf.role == "cotangent" for leaf in program.inputs):
        return ()
    numbers = () if program.compiler is None else program.compiler.donate_argnums
    return tuple(f"args[{n}]" for n in numbers)


def bytes_in(program: Program) -> Callable[[fx.Node, int], int]:
    """How many bytes a value of a program takes, or one result of several."""
    return bytes_of if program.runtime is None else program.runtime.bytes_of
