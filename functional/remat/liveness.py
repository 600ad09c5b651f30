"""Liveness: the memory that a program holds at each operation, computed on its graph.

The generated code drops every value after its last use (codegen.py), so the storages that are alive at an
operation are known without running it: those that are still to be read, the operation's own result,
arguments, which the caller keeps, and results of the program. Each storage is counted once, that of a
running sum too. Those of loops are alive in the iterations of a timeline (timeline.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import fx

from torchard.functional.core.spans import Span, bytes_at
from torchard.functional.programs.graphs import bytes_of
from torchard.functional.programs.loops import loops_together, reads_alone, regrouped
from torchard.functional.programs.markers import again, enter, item, row, rows, total
from torchard.functional.programs.program import Program
from torchard.functional.programs.running_sums import added_product, sum_so_far
from torchard.functional.programs.tags import LOOP, VAL
from torchard.functional.programs.views import handed_value, storage_of
from torchard.functional.remat.loop_residuals import with_loop_residuals
from torchard.functional.remat.split import halves_of
from torchard.functional.remat.timeline import Event, Place, ProgramTimeline

__all__ = [
    "Liveness",
    "Storage",
    "bytes_in",
    "donated_inputs",
    "liveness",
    "order_of",
    "peak_of",
    "storage_key",
]


class Storage(NamedTuple):
    """A storage: the node that allocates it, the index among its results, and the row in a loop."""

    node: fx.Node
    item: int = 0
    row: int | None = None


@dataclass
class Liveness:
    """When each storage is alive.

    Attributes:
        events: the operations, in execution order.
        made, last: for each storage, the positions in the order where it is allocated (-1 for inputs)
            and last read.
        size: for each storage, its bytes.
    """

    events: Sequence[Event]
    made: dict[Storage, int] = field(default_factory=dict)
    last: dict[Storage, int] = field(default_factory=dict)
    size: dict[Storage, int] = field(default_factory=dict)

    @property
    def order(self) -> list[fx.Node]:
        """The node of each event."""
        return [event.node for event in self.events]

    def held(self, without: Iterable[fx.Node] = ()) -> list[int]:
        """Bytes alive at each operation, including its result, without those of some nodes."""
        skipped = set(without)
        spans = (
            Span(begin, self.last[storage], self.size[storage])
            for storage, begin in self.made.items()
            if storage.node not in skipped
        )
        return bytes_at(spans, len(self.events))

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        held = self.held()
        return max((held[at] for at, event in enumerate(self.events) if event.ends), default=held[0])


def order_of(program: Program) -> list[fx.Node]:
    """The operations of a program in execution order; of a joint program, forward then backward.

    Those of a loop are together.
    """
    if any(leaf.role == "cotangent" for leaf in program.inputs):
        forward, backward = halves_of(program)
        return [*loops_together(forward), *loops_together(backward)]
    return [node for node in regrouped(program.graph) if node.op == "call_function"]


def liveness(program: Program) -> Liveness:
    """The liveness of a program; of a joint program, that of its forward followed by its backward.

    Over a mesh, sizes are those on the rank that holds most; buffers of collectives are not counted.
    """
    if any(leaf.role == "cotangent" for leaf in program.inputs):
        program = with_loop_residuals(program)
    return _Walk(program).run()


class _Walk:
    """Runs through the timeline of a program."""

    def __init__(self, program: Program) -> None:
        self.program, self.size = program, bytes_in(program)
        self.timeline = ProgramTimeline(order_of(program))
        self.live = Liveness(self.timeline.events)
        self.merged = _added_products(self.live.order)
        # For each sum over a loop's iterations, the first term, in whose storage it begins.
        self.terms: dict[fx.Node, Storage] = {}
        self.known: dict[Place, Storage] = {}

    def run(self) -> Liveness:
        live, end = self.live, len(self.live.events)
        donated = set(donated_inputs(self.program))
        for number, node in enumerate(self.program.placeholders):
            self._make(Storage(node), -1, self.size(node, 0))
            live.last[Storage(node)] = 0 if number in donated else end
        for at, (node, places, _) in enumerate(live.events):
            for i in places:
                for storage in self._allocated_by((node, i)):
                    self._make(storage, at, 0 if node in self.merged else self._bytes(storage))
                for storage, until in self._read_by((node, i), at):
                    self._read(storage, until)
                for user in node.users if i is not None else ():
                    self._collect(user, (node, i), at)
        for value in self.program.results:
            if isinstance(value, fx.Node):
                live.last[self._storage((value, None))] = end
        return live

    def _make(self, storage: Storage, at: int, size: int) -> None:
        if storage not in self.live.made:
            self.live.made[storage], self.live.size[storage] = at, size
            self._read(storage, at)

    def _bytes(self, storage: Storage) -> int:
        many = self.timeline.many((storage.node, storage.row))
        return self.size(storage.node, storage.item) * many

    def _read(self, storage: Storage, at: int) -> None:
        self.live.last[storage] = max(self.live.last.get(storage, at), at)

    def _collect(self, user: fx.Node, place: Place, at: int) -> None:
        """A value is written into the rows that are read after its loop, or added to their sum."""
        if user.target is rows and user not in self.timeline.apart:
            self._make(Storage(user), at, self.size(user, 0))
        elif user.target is total:
            if user not in self.terms:
                self.terms[user] = self._storage(place)
            elif Storage(user) not in self.live.made:  # the second term: the sum gets its own memory
                self._make(Storage(user), at, self.size(user, 0))
                self._read(self.terms[user], at)

    def _allocated_by(self, place: Place) -> Sequence[Storage]:
        """The storages an operation allocates."""
        node, _, i = self._storage(place)
        if node in self.timeline.apart or node.target in (rows, total) or node is not place[0]:
            return []
        val = VAL.get(node)
        if isinstance(val, (tuple, list)):
            return [Storage(node, k, i) for k, x in enumerate(val) if isinstance(x, torch.Tensor)]
        return [Storage(node, 0, i)]

    def _read_by(self, place: Place, at: int) -> Iterator[tuple[Storage, int]]:
        """The storages a node needs, and until which event.

        A getitem needs all of its tuple, whose items are freed together. A loop holds what is the same in
        all its iterations until it ends.
        """
        node, i = place
        if node.target in (again, rows, total) or node in self.timeline.apart:
            return  # what a loop keeps of its values is read by others
        if node.target in (enter, item):
            yield self._storage(place), at
            return
        if node.target is row and node.all_input_nodes[0] in self.timeline.apart:
            yield self._storage(place), at if reads_alone(node) else self.timeline.ends[LOOP.of(node)]
            return
        for operand in node.all_input_nodes:
            inside = LOOP.on(operand)
            leaving = inside and i is None  # a carry leaves with its last value
            source = operand, LOOP.of(operand).order()[-1] if leaving else i if inside else None
            whole = node.target is operator.getitem and self._allocated_by(source)
            shared = i is not None and not inside
            for storage in whole or [self._storage(source)]:
                yield storage, self.timeline.ends[LOOP.of(node)] if shared else at

    def _storage(self, place: Place) -> Storage:
        """The storage of a value."""
        if place not in self.known:
            self.known[place] = self._find(place)
        return self.known[place]

    def _find(self, place: Place) -> Storage:
        node, i = self.timeline.origin(place)
        while (before := sum_so_far(node)) is not None:
            node, i = self.timeline.origin((before, i))
        if node.target is operator.getitem:
            whole, item = node.args
            assert isinstance(whole, fx.Node) and isinstance(item, int)
            return Storage(whole, item, i)
        return Storage(node, 0, i)


def peak_of(program: Program) -> int:
    """The most bytes that are alive at once; of a pipeline, on the stage that holds most."""
    if program.runtime is None:
        return liveness(program).peak
    views = program.runtime.stages(program)
    return max(liveness(replace(program, runtime=view)).peak for view in views)


def storage_key(node: fx.Node) -> Storage:
    """The storage of a value; in a loop, in any iteration."""
    root = handed_value(storage_of(node))
    while (before := sum_so_far(root)) is not None:
        root = storage_of(before)
    if root.target is operator.getitem:
        whole, item = root.args
        assert isinstance(whole, fx.Node) and isinstance(item, int)
        return Storage(whole, item)
    return Storage(root)


def _added_products(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Products that are computed into a running sum."""
    found = (added_product(node) for node in nodes if sum_so_far(node) is not None)
    return {product for product in found if product is not None}


def donated_inputs(program: Program) -> list[int]:
    """The inputs that are donated; none in a joint program, whose backward may read them."""
    if any(leaf.role == "cotangent" for leaf in program.inputs) or program.compiler is None:
        return []
    starts = tuple(f"args[{n}]" for n in program.compiler.donate_argnums)
    return [i for i, leaf in enumerate(program.inputs) if leaf.path.startswith(starts)]


def bytes_in(program: Program) -> Callable[[fx.Node, int], int]:
    """A function for the bytes of a result of a node, by the program's runtime."""
    return bytes_of if program.runtime is None else program.runtime.bytes_of
