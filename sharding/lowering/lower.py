"""Lowering of an SPMD program to a flat graph of the operations that given coordinates run.

The virtual runtime lowers all coordinates into one graph; the process-group runtime lowers its own. A
value is held once per *distinct* coordinate: a value replicated over an axis is computed once for the
whole axis. The transport decides how a reshard step moves data; everything here is local arithmetic.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from torchard.functional.checks.looks import indices_of
from torchard.functional.programs.graphs import with_operands
from torchard.functional.programs.markers import Effect
from torchard.functional.programs.running_sums import added_product, sum_so_far
from torchard.functional.programs.tagging import Tags, inherited_tags, put
from torchard.functional.programs.tags import (
    CHECKS,
    COLLECTIVE,
    COORDINATES,
    LAYOUT,
    RUNNING,
    SHAPE,
    STEP,
    VAL,
)
from torchard.functional.torch_internals import ProgramGraph
from torchard.functional.torch_internals.operators import aten
from torchard.functional.updates.kernels import Update
from torchard.sharding.layouts.collective_ops import Send
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.reshard import ReshardStep
from torchard.sharding.layouts.tags import AFTER, BUCKET, GATHERED, LOWERED, TURN
from torchard.sharding.lowering.empty_shards import empty_shard_result
from torchard.sharding.rules import Call, lookup
from torchard.sharding.rules.blocks import Piece
from torchard.sharding.scheduling.collectives import record_of
from torchard.sharding.values.mesh import Mesh

__all__ = ["Emitter", "Fetch", "Lowering", "Transport", "Value", "axes_of", "result_layouts"]

Coords = dict[str, int]
Key = tuple[int, ...]


class Value:
    """A local value, or the result of a collective in flight, which is awaited at its first use."""

    __slots__ = ("_node", "_wait")

    def __init__(self, node: Any = None, wait: Callable[[], Any] | None = None) -> None:
        self._node, self._wait = node, wait

    def get(self) -> Any:
        if self._wait is not None:
            self._node, self._wait = self._wait(), None
        return self._node


class Transport(Protocol):
    """Moves data between coordinates.

    Attributes:
        late: whether collectives are asynchronous.
    """

    late: bool

    def step(
        self, low: Lowering, step: ReshardStep, values: dict[Key, Value], val: torch.Tensor
    ) -> dict[Key, Value]:
        """The values after a step, by key of ``step.after``."""

    def bucket(
        self, low: Lowering, moves: Sequence[tuple[ReshardStep, dict[Key, Value], torch.Tensor]]
    ) -> list[dict[Key, Value]]:
        """The values after each step of a bucket: steps that are sent as one collective."""

    def fetch(
        self, low: Lowering, what: Fetch, values: dict[Key, Value]
    ) -> dict[Key, Callable[[], list[fx.Node]]]:
        """For each coordinate, a function that waits for, and returns, the pieces its rank wants."""


@dataclass(frozen=True)
class Fetch:
    """The pieces of blocks along a dim that each rank needs, by the rank's index along ``axes``."""

    layout: Layout
    dim: int
    axes: tuple[str, ...]
    wanted: Sequence[Sequence[Piece]]
    val: torch.Tensor


class Emitter:
    """Appends operations to the local graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.tags: Tags = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        put(node, self.tags)
        return node

    def full(self, shape: Sequence[int], value: float | int | bool, like: torch.Tensor) -> fx.Node:
        return self.call(
            aten.full.default, list(shape), value, dtype=like.dtype, device=like.device
        )

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        return self.call(aten.reshape.default, x, list(shape))


class _Local:
    """The local arguments, shapes and ranges of one coordinate, which a rule's emitter is given."""

    def __init__(
        self, low: Lowering, call: Call, coords: Coords, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._low, self._call, self._coords = low, call, coords
        self.args, self.kwargs = args, kwargs

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self._low.emit.call(target, *args, **kwargs)

    def shape(self, result: int = 0) -> list[int]:
        layout = result_layouts(self._call.node)[result]
        return list(layout.local_shape(self._coords, self._low.mesh.shape))

    def operand_shape(self, operand: int) -> list[int]:
        layout = LAYOUT.of(self._call.operands[operand])
        return list(layout.local_shape(self._coords, self._low.mesh.shape))

    def result_range(self, dim: int) -> range:
        self._low.by_position = True
        layout = result_layouts(self._call.node)[0]
        return layout.local_range(dim, self._coords, self._low.mesh.shape)

    def operand_range(self, operand: int, dim: int) -> range:
        self._low.by_position = True
        layout: Layout = LAYOUT.of(self._call.operands[operand])
        return layout.local_range(dim, self._coords, self._low.mesh.shape)

    def result_axes(self, dim: int) -> tuple[str, ...]:
        return result_layouts(self._call.node)[0].axes_of(dim)

    def operand_axes(self, operand: int, dim: int) -> tuple[str, ...]:
        layout: Layout = LAYOUT.of(self._call.operands[operand])
        return layout.axes_of(dim)

    def is_distributed(self) -> bool:
        return not self._low.mesh.virtual and self._low.mesh.size > 1

    def is_first(self) -> bool:
        self._low.by_position = True
        own = {axis for axis, _ in result_layouts(self._call.node)[0].home}
        own.update(axis for operand in self._call.operands for axis in axes_of(operand))
        return all(axis in own or place == 0 for axis, place in self._coords.items())


def result_layouts(node: fx.Node) -> tuple[Layout, ...]:
    """The layouts of a node's tensors."""
    layout = LAYOUT.of(node)
    return layout if isinstance(layout, tuple) else (layout,)


class Lowering:
    """Lowers one SPMD graph for some coordinates (all of them, or this process's own).

    Attributes:
        by_position: set as soon as what is emitted depends on a coordinate's ranges of indices.
    """

    def __init__(
        self, graph: fx.Graph, mesh: Mesh, coords: Sequence[Coords], transport: Transport
    ) -> None:
        self.spmd, self.mesh, self.coords, self.transport = graph, mesh, coords, transport
        self.graph = ProgramGraph()
        self.emit = Emitter(self.graph)
        # The plan's record of the collective being lowered.
        self.record: Any = None
        self.env: dict[fx.Node, dict[Key, Value]] = {}
        self.by_position = False
        # What `distinct` has found, and for which coordinates, which keep their id.
        self._distinct: dict[tuple[Any, ...], tuple[Sequence[Coords], list[Coords]]] = {}
        self.numbers = itertools.count()
        self.in_flight: list[Value] = []
        self.scattered: list[fx.Node] = []
        self.buckets: dict[Any, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and BUCKET.on(node):
                self.buckets.setdefault(BUCKET.of(node), []).append(node)

    def run(self) -> fx.Graph:
        """The local graph, from the parts of all inputs, in order, to the parts of all outputs."""
        for node in self._in_order():
            if node in self.env:
                continue
            self._tag(node)
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self._node(node)
            else:
                parts = tuple(self._outputs(node))
                # No collective may be dropped: other ranks wait for it, even if this rank's shard is
                # empty and its result unused.
                for value in self.in_flight:
                    value.get()
                self.graph.output(parts)
        return self.graph

    def _tag(self, node: fx.Node) -> None:
        self.emit.tags = inherited_tags(node)
        self.record = COLLECTIVE.get(node)

    def tag_collective(self) -> None:
        """Tag what is emitted for this node from here on as its collective, simulated in one process."""
        if self.record is not None:
            self.emit.tags = {**self.emit.tags, COLLECTIVE: self.record}

    def distinct(self, layouts: Sequence[Layout]) -> list[Coords]:
        """One of the lowered coordinates for each distinct key over the axes of these layouts."""
        key = id(self.coords), frozenset(layouts)  # an update of many parameters has few layouts
        if key not in self._distinct:
            self._distinct[key] = self.coords, self._found(key[1])
        return self._distinct[key][1]

    def _found(self, layouts: frozenset[Layout]) -> list[Coords]:
        axes = sorted({a for layout in layouts for a in layout.axes})
        first: dict[Key, Coords] = {}
        for at in self.coords:
            if all(layout.is_at(at) for layout in layouts):
                first.setdefault(tuple(at[a] for a in axes), at)
        return list(first.values())

    def position(self, at: Coords, axes: Sequence[str]) -> int:
        """The index of a coordinate along some axes, the first axis outermost."""
        place = 0
        for axis in axes:
            place = place * self.mesh.shape[axis] + at[axis]
        return place

    def tagged(self, finish: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap ``finish`` to run under the current tags, not those of the result's first use."""
        tags = dict(self.emit.tags)

        def wait() -> Any:
            now, self.emit.tags = self.emit.tags, tags
            try:
                return finish()
            finally:
                self.emit.tags = now

        return wait

    def local_shape(self, layout: Layout, coords: Coords) -> tuple[int, ...]:
        return layout.local_shape(coords, self.mesh.shape)

    def _is_here(self, node: fx.Node) -> bool:
        """Whether a lowered coordinate computes the node, or takes part in sending it."""
        op = STEP.of(node).collective if STEP.on(node) else None
        if isinstance(op, Send):
            return True
        return any(all(x.is_at(at) for x in result_layouts(node)) for at in self.coords)

    def _placeholder(self, node: fx.Node) -> None:
        layout: Layout = LAYOUT.of(node)
        parts: dict[Key, Value] = {}
        places = self.distinct([layout])
        if not places:  # this rank holds an empty part
            self.graph.placeholder(f"part{next(self.numbers)}")
        for at in places:
            part = self.graph.placeholder(f"part{next(self.numbers)}")
            put(part, self.emit.tags)
            parts[layout.key(at)] = Value(part)
        self.env[node] = parts

    def _outputs(self, node: fx.Node) -> list[Any]:
        parts: list[Any] = []
        values: Any = node.args[0]
        for value in values:
            layout: Layout = LAYOUT.of(value)
            places = self.distinct([layout])
            parts.extend(self.env[value][layout.key(at)].get() for at in places)
            if not places:
                shape = layout.local_shape(self.coords[0], self.mesh.shape)
                parts.append(self.emit.full(shape, 0, VAL.of(value)))
        return parts

    def _bucket(self, members: Sequence[fx.Node]) -> None:
        """Lower a bucket's steps at once."""
        moves = [
            (STEP.of(m), self.env[m.all_input_nodes[0]], VAL.of(m)) for m in members
        ]
        # The plan records a bucket on one member only, which a split may have put in another graph.
        named = next((m for m in members if COLLECTIVE.on(m)), members[0])
        self._tag(named)
        self.record = self.record or record_of(*moves[0][::2], named, self.mesh.sizes)
        self.env.update(zip(members, self.transport.bucket(self, moves), strict=True))

    def _in_order(self) -> Iterator[fx.Node]:
        """The nodes in the order in which they are lowered, the same on every rank.

        It is that of the graph, but that all operands of a bucket come before its first member: a split
        may have put some after it.
        """
        done: set[fx.Node] = set()
        for wanted in self.spmd.nodes:
            stack = [wanted]
            while stack:
                node = stack[-1]
                members = self.buckets.get(BUCKET.get(node), [node])
                missing = [n for m in members for n in m.all_input_nodes if n not in done]
                stack.extend(missing if node not in done else ())
                if node in done or not missing:
                    stack.pop()
                    if node not in done:
                        done.add(node)
                        yield node

    def _node(self, node: fx.Node) -> None:
        if not self._is_here(node):
            self.env[node] = {}
            return
        if TURN.on(node):
            self._keep_step(node)
        self._wait_for(self.buckets.get(AFTER.get(node), ()))
        bucket = self.buckets.get(BUCKET.get(node), ())
        if len(bucket) > 1:
            self._bucket(bucket)
        elif STEP.on(node):
            (source,) = node.all_input_nodes
            val = VAL.of(node)
            self.env[node] = self.transport.step(self, STEP.of(node), self.env[source], val)
        elif LOWERED.on(node):
            self.env[node] = LOWERED.of(node)(self, node)
        elif node.target is operator.getitem:
            self._getitem(node)
        else:
            self._operation(node)

    def _keep_step(self, node: fx.Node) -> None:
        """Wait for gradients scattered two layers ago, since their send buffers are held until then."""
        if STEP.on(node):
            self.scattered.append(node)
            return
        while self.scattered and TURN.of(self.scattered[0]) < TURN.of(node) - 1:
            self._wait_for([self.scattered.pop(0)])

    def _wait_for(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            for value in self.env.get(node, {}).values():
                value.get()

    def _getitem(self, node: fx.Node) -> None:
        source, position = node.args
        assert isinstance(source, fx.Node) and isinstance(position, int)
        layout: Layout = LAYOUT.of(node)
        parts: dict[Key, Value] = {}
        axes = axes_of(source)
        for at in self.distinct(result_layouts(source)):
            value = self.env[source][tuple(at[a] for a in axes)].get()
            if layout.key(at) in parts:
                continue
            chosen = (
                value[position]
                if isinstance(value, tuple)
                else self.emit.call(operator.getitem, value, position)
            )
            parts[layout.key(at)] = Value(chosen)
        self.env[node] = parts

    def _operation(self, node: fx.Node) -> None:
        call = Call.of(node)
        outs = result_layouts(node)
        layouts = [*(LAYOUT.of(o) for o in call.operands), *outs]
        axes = axes_of(node)
        parts: dict[Key, Value] = {}
        for at in self.distinct(layouts):
            key = tuple(at[a] for a in axes)
            if key not in parts:
                parts[key] = Value(self._local(node, call, outs, at))
            elif isinstance(node.target, Effect):  # each rank sees its own, after the one before
                token = self.emit.call(operator.getitem, parts[key].get(), 0)
                parts[key] = Value(self._local(node, call, outs, at, token))
        self.env[node] = parts

    def _named(self, node: fx.Node, at: Coords) -> None:
        """Say for checks which rank runs what is emitted for an operation."""
        if self.mesh.virtual and CHECKS.on(node):
            rank = ", ".join(f"{axis}={i}" for axis, i in at.items())
            batch = COORDINATES.get(node)
            names = [f"rank {rank}", *([batch] if batch else [])]
            self.emit.tags = {**self.emit.tags, COORDINATES: ", ".join(names)}

    def _looked_at(self, node: fx.Node, call: Call, here: list[Any]) -> list[Any]:
        """The operands, of which indices are looked at before ranks leave out those of others."""
        known = dict(indices_of(node)) if CHECKS.of(node).index else {}
        return [
            self.emit.call(known[operand], x) if operand in known else x
            for operand, x in zip(call.operands, here, strict=True)
        ]

    def _local(
        self, node: fx.Node, call: Call, outs: tuple[Layout, ...], at: Coords, token: Any = None
    ) -> Any:
        self._named(node, at)
        if not isinstance(node.target, Update):  # whose parameters may be empty one by one
            empty = empty_shard_result(call, outs, at, self.mesh.shape, self.emit.full)
            if empty is not None:
                return empty

        here = [self.env[o][LAYOUT.of(o).key(at)].get() for o in call.operands]
        here = here if token is None else [token, *here[1:]]
        if CHECKS.on(node):
            here = self._looked_at(node, call, here)
        args, kwargs = with_operands(node, here)
        rule = lookup(node.target)
        if rule is not None and rule.emit is not None and not GATHERED.get(node):
            result = rule.emit(call, _Local(self, call, at, args, kwargs))
        else:
            result = self.emit.call(node.target, *args, **kwargs)
        if len(outs) == 1 and isinstance(result, fx.Node):
            SHAPE.set(result, self.local_shape(outs[0], at))
            if sum_so_far(node) is not None:
                RUNNING.set(result, added_product(node) is not None)
        return result


def axes_of(node: fx.Node) -> list[str]:
    """The axes over which the tensors of a node are split or pending."""
    return sorted({a for layout in result_layouts(node) for a in layout.axes})
