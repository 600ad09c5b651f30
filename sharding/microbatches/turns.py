"""The operations of an SPMD graph over microbatches, one microbatch after another, as one global graph.

First come the operations that are the same for all microbatches, then each microbatch's operations in
turn, then the operations that need complete sums. So the values of one microbatch are dead when the next
begins, but for the running sums and the slices of results. Where the microbatches need a sum over all of
them, such as the number of labels that count, a turn of their own computes it before, with all that it is
computed from; it may have no product, since that is computed again.

Only the first microbatch is lowered. The others have copies of its operations on slices of their own,
except for operations that depend on which rows a microbatch has.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.core.errors import AccumulateError
from torchard.functional.costs.flops import is_product
from torchard.functional.programs.graphs import output_node
from torchard.functional.programs.tagging import forget, inherit
from torchard.functional.programs.tags import COORDINATES, LAYOUT, NAME, SHAPE, SOURCE, STEP, VAL
from torchard.functional.programs.views import is_view
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.collective_ops import AllGather, AllReduce, LocalSlice
from torchard.sharding.layouts.layout import Dim, Layout
from torchard.sharding.layouts.tags import CALL, GATHERED, LOWERED, MICROBATCH, RULE
from torchard.sharding.lowering.lower import Emitter, Lowering, Value, axes_of, result_layouts
from torchard.sharding.lowering.simulated_transport import SimulatedTransport
from torchard.sharding.microbatches.mark import AXIS
from torchard.sharding.scheduling.collectives import op_of
from torchard.sharding.values.mesh import Mesh

__all__ = ["in_turn"]

_ADD = {"sum": aten.add.Tensor, "max": aten.maximum.default, "min": aten.minimum.default}
_NARROW = (torch.float16, torch.bfloat16)


def in_turn(graph: fx.Graph, steps: int) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph over global values, and the nodes in it that a microbatch's turn computes.

    Raises:
        AccumulateError: the microbatches need a sum whose terms take a product or convolution.
    """
    turns = _Turns(graph, steps)
    return turns.run(), turns.made


class _Turns(Lowering):
    """Lowers the coordinates of the axis one after another."""

    emit: _Emitter

    def __init__(self, graph: fx.Graph, steps: int) -> None:
        mesh = Mesh({AXIS: steps}, virtual=True)
        super().__init__(graph, mesh, mesh.all_coords(), SimulatedTransport())
        self.emit = _Emitter(self.graph, VAL.of(next(iter(graph.nodes))).fake_mode)
        self.loops = _Loops(graph)
        self.turns = mesh.all_coords()
        self.made: list[fx.Node] = []
        self.running: dict[fx.Node, list[fx.Node]] = {}
        # What the first microbatch has for a node, and what was emitted for it, if others have copies.
        self.first: dict[fx.Node, tuple[list[Any], list[fx.Node] | None]] = {}
        # What the current microbatch has in place of a node of the first.
        self.now: dict[fx.Node, fx.Node] = {}

    def run(self) -> fx.Graph:
        for node in self.spmd.nodes:
            if node.op == "placeholder":
                copied = self.graph.node_copy(node)
                inherit(copied, node, "call")
                forget(copied, LAYOUT)
                self.env[node] = {(): Value(copied)}
        for ends in self.loops.ends:
            inside = self.loops.computed_for(ends)
            self._whole(source for node in inside for source in node.all_input_nodes)
            before = set(self.graph.nodes)
            self.first = {}
            for at in self.turns:
                self._turn(inside, at, awaited=ends is not self.loops.ends[-1])
            self.made += [node for node in self.graph.nodes if node not in before]
            for node in ends:
                self.env[node] = {(): Value(self._completed(node))}
        out = output_node(self.spmd)
        self._whole(out.all_input_nodes)
        results = fx.map_arg(out.args[0], lambda node: self.env[node][()].get())
        inherit(self.graph.output(results), out, "call")
        return self.graph

    def _whole(self, wanted: Iterable[fx.Node]) -> None:
        """Emit the values that no microbatch changes and these depend on, in their order."""
        needed: set[fx.Node] = set()
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if node not in self.env and node not in needed and not self.loops.varies(node):
                needed.add(node)
                stack.extend(node.all_input_nodes)
        self.coords = self.turns[:1]
        for node in self.spmd.nodes:
            if node in needed:
                self._tag(node)
                self._emit(node, self.turns[0])

    def _turn(self, inside: Sequence[fx.Node], at: dict[str, int], awaited: bool) -> None:
        """Emit the operations of one microbatch.

        Args:
            awaited: whether all microbatches wait for it, so that it is part of none of them.
        """
        self.coords, self.now = [at], {}
        for node in inside:
            _, made = self.first.get(node, (None, None))
            if made is not None:
                self._again(node, made, at)
                continue
            self._tag(node)
            if not awaited:
                self.emit.tags = {
                    **self.emit.tags,
                    MICROBATCH: at[AXIS],
                    COORDINATES: _named(at),
                }
            self.emit.made, self.by_position = [], False
            self._emit(node, at)
            self._note(node)

    def _note(self, node: fx.Node) -> None:
        """Note what the first microbatch emitted for a node, or which node another one has instead."""
        values = [value.get() for value in self.env.get(node, {}).values()]
        if node not in self.first:
            again = not (self.by_position or STEP.on(node) or LOWERED.on(node))
            self.first[node] = values, self.emit.made if again else None
            return
        pairs = zip(_nodes(self.first[node][0]), _nodes(values), strict=True)
        self.now.update(pairs)

    def _again(self, node: fx.Node, made: Sequence[fx.Node], at: dict[str, int]) -> None:
        """Emit what the first microbatch emitted for a node, on the values of another one."""
        for first in made:
            copied = self.graph.node_copy(first, self._here)
            if MICROBATCH.on(first):
                MICROBATCH.set(copied, at[AXIS])
                COORDINATES.set(copied, _named(at))
            self.now[first] = copied
        (value,) = self.first[node][0]
        self.env[node] = {tuple(at[a] for a in axes_of(node)): Value(fx.map_arg(value, self._here))}

    def _here(self, first: fx.Node) -> fx.Node:
        return self.now.get(first, first)

    def _emit(self, node: fx.Node, at: dict[str, int]) -> None:
        if not STEP.on(node):
            self._node(node)
            return
        (source,) = node.all_input_nodes
        value = self.env[source][LAYOUT.of(source).key(at)].get()
        if isinstance(op_of(node), LocalSlice):
            part = self._slice(value, VAL.of(node).shape, LAYOUT.of(node), at)
            self.env[node] = {LAYOUT.of(node).key(at): Value(part)}
        else:
            self._add(node, value)

    def _local(
        self, node: fx.Node, call: Any, outs: tuple[Layout, ...], at: dict[str, int], token: Any = None
    ) -> Any:
        result = super()._local(node, call, outs, at, token)
        if isinstance(result, fx.Node):
            _pass_on(node, result)
        return result

    # -- steps ----------------------------------------------------------------------------------

    def _slice(self, value: fx.Node, shape: Sequence[int], layout: Layout, at: dict[str, int]) -> fx.Node:
        dim, outer, width, inner = _split(shape, layout, self.mesh.shape[AXIS])
        turn = at[AXIS]
        if outer == 1:
            step = width * inner
            return self.emit.call(aten.slice.Tensor, value, dim, turn * step, (turn + 1) * step)
        steps = self.mesh.shape[AXIS]
        cut = [*shape[:dim], outer, steps, width * inner, *shape[dim + 1 :]]
        part = self.emit.call(aten.select.int, self.emit.view(value, cut), dim + 1, turn)
        return self.emit.view(part, self.local_shape(layout, at))

    def _add(self, node: fx.Node, part: fx.Node) -> None:
        """Add a microbatch's part to a running sum, or to the slices of a result."""
        known = self.running.setdefault(node, [])
        op = op_of(node)
        if isinstance(op, AllReduce):
            val = VAL.of(part)
            if op.reduction == "sum" and val.dtype in _NARROW:
                part = self.emit.call(aten._to_copy.default, part, dtype=torch.float32)
            target = aten.logical_or.default if val.dtype is torch.bool else _ADD[op.reduction or "sum"]
            known[:] = [self.emit.call(target, *known, part) if known else part]
        else:
            assert isinstance(op, AllGather)
            known.append(part)

    def _completed(self, node: fx.Node) -> fx.Node:
        parts, val = self.running.pop(node), VAL.of(node)
        self._tag(node)
        if isinstance(op_of(node), AllReduce):
            (total,) = parts
            if VAL.of(total).dtype != val.dtype:
                total = self.emit.call(aten._to_copy.default, total, dtype=val.dtype)
        else:
            (source,) = node.all_input_nodes
            dim, outer, width, inner = _split(val.shape, LAYOUT.of(source), self.mesh.shape[AXIS])
            if outer > 1:
                cut = [*val.shape[:dim], outer, width * inner, *val.shape[dim + 1 :]]
                parts = [self.emit.view(part, cut) for part in parts]
            total = self.emit.call(aten.cat.default, parts, dim + (outer > 1))
            if outer > 1:
                total = self.emit.view(total, val.shape)
        return total


def _nodes(values: Any) -> list[fx.Node]:
    """The nodes in results, in order."""
    found: list[fx.Node] = []
    fx.map_arg(values, found.append)
    return found


def _pass_on(node: fx.Node, result: fx.Node) -> None:
    """Tag the result of a node's operation at one coordinate as the node is."""
    if result.target == node.target:
        own = [(tag, tag.of(result)) for tag in (VAL, MICROBATCH) if tag.on(result)]
        inherit(result, node, "call")
        for tag, value in own:
            tag.set(result, value)
        forget(result, LAYOUT, GATHERED, CALL, RULE, SHAPE)
    elif NAME.on(node):
        NAME.set(result, NAME.of(node))


def _split(shape: Sequence[int], layout: Layout, steps: int) -> tuple[int, int, int, int]:
    """The dim that the axis splits, and the factors of which it is a product.

    Returns:
        The dim; the sizes of what is outside of the microbatches, of one microbatch, and inside.
    """
    dim = layout.dim_of(AXIS)
    assert dim is not None
    subs: Dim = layout.dims[dim]
    place = next(i for i, sub in enumerate(subs) if sub.axes)
    assert subs[place].size % steps == 0, layout
    outer = math.prod(sub.size for sub in subs[:place])
    inner = math.prod(sub.size for sub in subs[place + 1 :])
    return dim, outer, subs[place].size // steps, inner


class _Emitter(Emitter):
    """Gives each new node its value: that of an earlier call with arguments that are alike."""

    def __init__(self, graph: fx.Graph, fakes: Any) -> None:
        super().__init__(graph)
        self.fakes = fakes  # without which a value that has no operands would be a real one
        self.made: list[fx.Node] = []  # of late
        self._known: dict[Hashable, Any] = {}
        self._alike: dict[Hashable, torch.Tensor] = {}
        # The number of the kind of each value, by the value's id, and the value, which keeps its id.
        self._kinds: dict[int, tuple[torch.Tensor, int]] = {}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if target is aten.contiguous.default:  # fit for ranks, but no operation of a program
            if VAL.of(args[0]).is_contiguous():
                node: fx.Node = args[0]
                return node
            target, kwargs = aten.clone.default, {"memory_format": torch.contiguous_format}
        node = super().call(target, *args, **kwargs)
        self.made.append(node)
        values, named = fx.map_arg((args, kwargs), VAL.of)
        key = target, self._identified(values), self._identified(tuple(named.items()))
        if key not in self._known:
            with internals.no_modes(), torch.no_grad(), self.fakes:
                self._known[key] = fx.node.map_aggregate(target(*values, **named), self._one_of)
        VAL.set(node, self._known[key])
        return node

    def _one_of(self, value: Any) -> Any:
        """One for all values that differ only in where they begin, as the slices of microbatches do."""
        if not isinstance(value, torch.Tensor):
            return value
        kind = value.shape, value.stride(), value.dtype, value.device
        one = self._alike.setdefault((kind, value.untyped_storage().nbytes()), value)
        self._kinds[id(value)] = value, id(one)
        return one

    def _identified(self, value: Any) -> Hashable:
        """Arguments as a key; values that are alike are equal."""
        if isinstance(value, (tuple, list)):
            return tuple(map(self._identified, value))
        if not isinstance(value, torch.Tensor):
            return type(value), value
        if id(value) not in self._kinds:
            self._one_of(value)
        return "value", self._kinds[id(value)][1]


class _Loops:
    """Which values vary, and the loops that compute the sums and slices of them.

    Attributes:
        ends: for each loop, the steps that add up or collect what it computes.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self._level: dict[fx.Node, int] = {}
        feeds: set[fx.Node] = set()
        for node in self.nodes:
            below = max((self._level[source] for source in node.all_input_nodes), default=0)
            self._level[node] = below + self._is_end(node)
        for node in reversed(self.nodes):
            if self.varies(node) or any(user in feeds for user in node.users):
                feeds.add(node)
        last = max((self._level[node] for node in self.nodes if self.varies(node)), default=0)
        self.ends: list[list[fx.Node]] = [[] for _ in range(last + 1)]
        for node in self.nodes:
            if self._is_end(node):
                early = node in feeds
                self.ends[self._level[node] - 1 if early else last].append(node)
        for ends in self.ends[:-1]:
            self._check(ends)

    def varies(self, node: fx.Node) -> bool:
        """Whether microbatches have different values of a node."""
        return LAYOUT.on(node) and any(layout.axes for layout in result_layouts(node))

    def _begins(self, node: fx.Node) -> fx.Node:
        """The operation that begins a sum, of which a pending value may be a view or a part."""
        while True:
            pending = [n for n in node.all_input_nodes if any(x.awaited for x in result_layouts(n))]
            if not pending and node.target is not operator.getitem:
                return node
            node = (pending or node.all_input_nodes)[0]

    def _is_end(self, node: fx.Node) -> bool:
        return isinstance(op_of(node), (AllReduce, AllGather))

    def computed_for(self, ends: Sequence[fx.Node]) -> list[fx.Node]:
        """What a microbatch computes for these ends, each of which comes right after its operand."""
        needed = set(ends)
        stack = list(ends)
        while stack:
            for source in stack.pop().all_input_nodes:
                if self.varies(source) and source not in needed:
                    needed.add(source)
                    stack.append(source)
        after: dict[fx.Node, list[fx.Node]] = {}
        for end in ends:
            after.setdefault(end.all_input_nodes[0], []).append(end)
            needed.discard(end)
        return [step for node in self.nodes if node in needed for step in (node, *after.get(node, ()))]

    def _check(self, ends: Sequence[fx.Node]) -> None:
        """Refuse a loop whose work would be done again."""
        for end in ends:
            heavy = next((node for node in self.computed_for([end]) if is_product(node)), None)
            if heavy is not None:
                raise AccumulateError(_waits(self._begins(end.all_input_nodes[0]), heavy))


def _waits(source: fx.Node, heavy: fx.Node) -> str:
    """Why a loop over microbatches would have to be run twice, and what to do."""
    at, of = (SOURCE.get(node) or "an unknown line" for node in (source, heavy))
    after = f"microbatches cannot be computed one after another (it depends on {heavy.target} at {of})"
    if is_view(source):
        return (
            f"{at}: {source.target} takes single examples out of the batch, so {after}. "
            "torch.vmap computes examples one by one if it has no rule for an operation, such as "
            "the gradient of index_select: use table[ids] or embedding instead, or checkpoint "
            "instead of accumulate."
        )
    return (
        f"{at}: {source.target} is a sum over the whole batch, and the rest of the computation depends "
        f"on it, so {after}. Statistics of the batch, as in batch normalization, need the whole "
        "batch: use statistics of each example, as in layer or group normalization, fixed ones (eval "
        "mode), or checkpoint in place of accumulate."
    )


def _named(at: dict[str, int]) -> str:
    """A microbatch, in messages."""
    return f"microbatch {at[AXIS]}"
