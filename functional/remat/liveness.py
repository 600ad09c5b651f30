"""Liveness: the memory that a program holds at each operation, computed on its graph.

The generated code drops every value after its last use (codegen.py), so the storages that are alive at an
operation are known without running it: those that are still to be read, the operation's own result,
arguments, which the caller keeps, and results of the program. Each storage is counted once, that of a
running sum too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from torchard.functional.programs.graphs import bytes_of
from torchard.functional.programs.program import Program
from torchard.functional.programs.running_sums import added_product, sum_so_far
from torchard.functional.programs.tags import VAL
from torchard.functional.programs.views import storage_of
from torchard.functional.remat.split import halves_of

__all__ = ["Liveness", "Storage", "bytes_in", "liveness", "order_of", "peak_of", "storage_key"]

# A storage: the node that allocates it, and the index among its results.
Storage = tuple[fx.Node, int]


@dataclass
class Liveness:
    """When each storage is alive.

    Attributes:
        order: the operations, in execution order.
        made, last: for each storage, the positions in the order where it is allocated (-1 for inputs)
            and last read.
        size: for each storage, its bytes.
    """

    order: list[fx.Node]
    made: dict[Storage, int] = field(default_factory=dict)
    last: dict[Storage, int] = field(default_factory=dict)
    size: dict[Storage, int] = field(default_factory=dict)

    def held(self, without: Iterable[fx.Node] = ()) -> list[int]:
        """Bytes alive at each operation, including its result, without those of some nodes."""
        skipped = set(without)
        change = [0] * (len(self.order) + 2)
        for storage, begin in self.made.items():
            if storage[0] in skipped:
                continue
            change[max(begin, 0)] += self.size[storage]
            change[self.last[storage] + 1] -= self.size[storage]
        held, total = [], 0
        for delta in change[: max(len(self.order), 1)]:
            total += delta
            held.append(total)
        return held

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return max(self.held())


def order_of(program: Program) -> list[fx.Node]:
    """The operations of a program in execution order; of a joint program, forward then backward."""
    if any(leaf.role == "cotangent" for leaf in program.inputs):
        forward, backward = halves_of(program)
        return [*forward, *backward]
    return program.calls


def liveness(program: Program) -> Liveness:
    """The liveness of a program; of a joint program, that of its forward followed by its backward.

    Over a mesh, sizes are those on the rank that holds most; buffers of collectives are not counted.
    """
    size = bytes_in(program)
    live = Liveness(order_of(program))
    end = len(live.order)
    donated = _donated(program)
    for leaf, node in zip(program.inputs, program.placeholders, strict=True):
        storage = node, 0
        live.made[storage], live.size[storage] = -1, size(node, 0)
        live.last[storage] = 0 if leaf.path.startswith(donated) else end
    merged = _added_products(live.order)
    for at, node in enumerate(live.order):
        for storage in _allocated_by(node):
            if storage not in live.made:
                live.made[storage] = at
                live.size[storage] = 0 if node in merged else size(*storage)
                live.last[storage] = at
        for storage in _read_by(node):
            live.last[storage] = max(live.last[storage], at)
    for value in program.results:
        live.last[storage_key(value)] = end
    return live


def peak_of(program: Program) -> int:
    """The most bytes that are alive at once; of a pipeline, on the stage that holds most."""
    if program.runtime is None:
        return liveness(program).peak
    views = program.runtime.stages(program)
    return max(liveness(replace(program, runtime=view)).peak for view in views)


def _allocated_by(node: fx.Node) -> Sequence[Storage]:
    """The storages an operation allocates."""
    if storage_key(node)[0] is not node:
        return []
    val = VAL.get(node)
    if isinstance(val, (tuple, list)):
        return [(node, i) for i, item in enumerate(val) if isinstance(item, torch.Tensor)]
    return [(node, 0)]


def _added_products(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Products that are computed into a running sum."""
    found = (added_product(node) for node in nodes if sum_so_far(node) is not None)
    return {product for product in found if product is not None}


def _read_by(node: fx.Node) -> Iterable[Storage]:
    """The storages a node needs; a getitem needs all of its tuple, whose items are freed together."""
    if node.target is operator.getitem:
        return _allocated_by(node.all_input_nodes[0]) or [storage_key(node)]
    return map(storage_key, node.all_input_nodes)


def storage_key(node: fx.Node) -> Storage:
    """The storage of a value: the node that allocates it, and the index among its results."""
    root = storage_of(node)
    while (before := sum_so_far(root)) is not None:
        root = before
    if root.target is operator.getitem:
        whole, item = root.args
        assert isinstance(whole, fx.Node) and isinstance(item, int)
        return whole, item
    return root, 0


def _donated(program: Program) -> tuple[str, ...]:
    """Path prefixes of donated arguments; none in a joint program, whose backward may read them."""
    if any(leaf.role == "cotangent" for leaf in program.inputs):
        return ()
    numbers = () if program.compiler is None else program.compiler.donate_argnums
    return tuple(f"args[{n}]" for n in numbers)


def bytes_in(program: Program) -> Callable[[fx.Node, int], int]:
    """A function for the bytes of a result of a node, by the program's runtime."""
    return bytes_of if program.runtime is None else program.runtime.bytes_of
