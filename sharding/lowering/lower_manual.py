"""What the moves of manual mode lower to: steps of the transports, between layouts made for them.

A program with a ``shard_map`` inside is an SPMD program like any other: the split into halves keeps local
residuals, and both runtimes lower local operations coordinate by coordinate. Only the moves are new.
What they are over is said by sub-dims of their own, outside of what the other axes split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from torchard.sharding.layouts.layout import VARYING, Dim, Layout, Sizes, Sub, refine
from torchard.sharding.layouts.reshard import Step
from torchard.sharding.lowering.lower import Key, Lowering, Value
from torchard.sharding.manual.manual_collectives import (
    Exchange,
    Extreme,
    Gather,
    GatherWhole,
    Move,
    Permute,
    Scatter,
    Slice,
    Sum,
    is_axis_index,
    move_of,
)
from torchard.sharding.scheduling.collectives import record_of
from torchard.sharding.values.mesh import Mesh

__all__ = ["attach_moves"]


def attach_moves(graph: fx.Graph, mesh: Mesh) -> None:
    """Say on each node of an SPMD graph that is a move how it is lowered, and what it sends."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_axis_index(node):
            node.meta["lowered"] = _lower_index
        elif (move := move_of(node)) is not None:
            step = _step(move, node, mesh)
            node.meta["lowered"] = _Lowered(step)
            if step is not None and step.kind != "slice":
                tags = {k: node.meta[k] for k in ("source", "scope", "phase") if k in node.meta}
                val = node.all_input_nodes[0].meta["val"]
                node.meta["collective"] = record_of(step, val, tags, mesh.sizes)


def _step(move: Move, node: fx.Node, mesh: Mesh) -> Step | None:
    """What is moved; None where only the meaning of a value changes."""
    make = _STEPS.get(type(move))
    if make is None:
        return None
    alone = math.prod(mesh.shape[a] for a in move.over) == 1
    if alone and not (isinstance(move, Permute) and not move.sources):
        return None
    (source,) = node.all_input_nodes
    return make(move, _Operand(source.meta["layout"], move.over, mesh.sizes))


class _Operand:
    """The layout of what is moved, along the axes that the move is not over."""

    def __init__(self, layout: Layout, over: frozenset[str], sizes: Sizes) -> None:
        self.dims, self.sizes = layout.dims, sizes
        self.rest = tuple(p for p in layout.pending if p[0] not in over)

    def layout(self, dims: Mapping[int, Dim], pending: Iterable[tuple[str, str]] = ()) -> Layout:
        """That layout but for some dims, and pending over more axes."""
        made = tuple(dims.get(i, dim) for i, dim in enumerate(self.dims))
        return Layout(made, (*self.rest, *pending))

    def part(self, dim: int, parts: int) -> Dim:
        """What a dim is within each of the equal parts that a move makes of it."""
        size = math.prod(s.size for s in self.dims[dim])
        if not size:
            return (Sub(0, tuple(a for s in self.dims[dim] for a in s.axes)),)
        cut = refine(self.dims[dim], (parts, size // parts), self.sizes)
        assert cut is not None, "a move's rule keeps the parts whole"
        return cut[1]


def _beside(parts: int, axes: tuple[str, ...], part: Dim) -> Dim:
    """Parts side by side, one on each rank along some axes or all on each; one dim if it can be."""
    if len(part) == 1 and not part[0].axes:
        return (Sub(parts * part[0].size, axes),)
    return (Sub(parts, axes), *part)


def _reduced(axes: tuple[str, ...], op: str, x: _Operand) -> Step:
    before = x.layout({}, ((a, op) for a in axes))
    return Step("all_reduce", axes, before, x.layout({}), op=op)


def _gathered(m: Any, x: _Operand) -> Step:
    part = x.dims[m.dim]
    before = x.layout({m.dim: _beside(m.size, m.axes, part)})
    after = x.layout({m.dim: _beside(m.size, (), part)})
    return Step("all_gather", m.axes, before, after, at=(m.dim, 0))


def _scattered(m: Any, x: _Operand) -> Step:
    part = x.part(m.dim, m.size)
    before = x.layout({m.dim: _beside(m.size, (), part)}, ((a, "sum") for a in m.axes))
    after = x.layout({m.dim: _beside(m.size, m.axes, part)})
    return Step("psum_scatter", m.axes, before, after, to=(m.dim, 0), op="sum")


def _sliced(m: Any, x: _Operand) -> Step:
    part = x.part(m.dim, m.size)
    before = x.layout({m.dim: _beside(m.size, (), part)})
    after = x.layout({m.dim: _beside(m.size, m.axes, part)})
    return Step("slice", m.axes, before, after, to=(m.dim, 0))


def _exchanged(m: Any, x: _Operand) -> Step:
    """The ranks are a sub-dim in front of the concat dim, the parts one in front of the split dim."""
    ranks, parts, part = Sub(m.size, m.axes), Sub(m.size), x.part(m.split, m.size)
    if m.split == m.concat:
        have = {m.split: (ranks, parts, *part)}
        want = {m.split: (parts, ranks, *part)}
    else:
        have = {m.split: (parts, *part), m.concat: (ranks, *x.dims[m.concat])}
        want = {m.split: (ranks, *part), m.concat: (parts, *x.dims[m.concat])}
    to = (m.split, 1 if m.split == m.concat else 0)
    return Step("all_to_all", m.axes, x.layout(have), x.layout(want), at=(m.concat, 0), to=to)


def _permuted(m: Any, x: _Operand) -> Step:
    layout = x.layout({}, ((a, VARYING) for a in m.axes))
    pairs = tuple(zip(m.sources, m.targets, strict=True))
    return Step("ppermute", m.axes, layout, layout, pairs=pairs)


_STEPS: dict[type[Move], Callable[[Any, _Operand], Step]] = {
    Sum: lambda m, x: _reduced(m.axes, "sum", x),
    Extreme: lambda m, x: _reduced(m.axes, m.which, x),
    Gather: _gathered,
    GatherWhole: _gathered,
    Scatter: _scattered,
    Slice: _sliced,
    Exchange: _exchanged,
    Permute: _permuted,
}


# -- lowering -------------------------------------------------------------------------------------


class _Lowered:
    """How a move is lowered: its step, between the operand's layout and the result's."""

    def __init__(self, step: Step | None) -> None:
        self.step = step

    def __call__(self, low: Lowering, node: fx.Node) -> dict[Key, Value]:
        (source,) = node.all_input_nodes
        have, values = source.meta["layout"], low.env[source]
        if self.step is not None:
            values = _told_apart(low, values, have, self.step.before)
            values = low.transport.step(low, self.step, values, source.meta["val"])
            have = self.step.after
        return _told_apart(low, values, have, node.meta["layout"])

    def __repr__(self) -> str:
        return "" if self.step is None else self.step.kind


def _told_apart(
    low: Lowering, values: dict[Key, Value], have: Layout, want: Layout
) -> dict[Key, Value]:
    """The same local values, by the coordinates that another layout tells apart."""
    return {want.key(at): values[have.key(at)] for at in low.distinct([want])}


def _lower_index(low: Lowering, node: fx.Node) -> dict[Key, Value]:
    layout: Layout = node.meta["layout"]
    axes: Any = node.args[1]
    found = {}
    for at in low.distinct([layout]):
        position = 0
        for a in axes:
            position = position * low.mesh.shape[a] + at[a]
        found[layout.key(at)] = Value(low.emit.full([], position, node.meta["val"]))
    return found
