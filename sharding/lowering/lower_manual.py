"""Lowering of shard_map's collectives (`Move`) to reshard steps.

A program with a ``shard_map`` inside is an SPMD program like any other: the split into forward and
backward keeps local residuals, and both runtimes lower local operations coordinate by coordinate. Only
the moves need lowerings of their own. The axes of a move are expressed as sub-dims of their own, outside
of those that the other axes split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import fx

from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, VAL
from torchard.sharding.layouts.collective_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectiveVisitor,
    LocalSlice,
    Ppermute,
    PsumScatter,
    Send,
)
from torchard.sharding.layouts.layout import VARYING, Dim, Layout, Sizes, Sub, refine
from torchard.sharding.layouts.reshard import ReshardStep
from torchard.sharding.layouts.tags import LOWERED
from torchard.sharding.lowering.lower import Key, Lowering, Value
from torchard.sharding.manual.manual_collectives import Move, is_axis_index, move_of
from torchard.sharding.scheduling.collectives import record_of
from torchard.sharding.values.mesh import Mesh

__all__ = ["attach_moves"]


def attach_moves(graph: fx.Graph, mesh: Mesh) -> None:
    """Tag each move of an SPMD graph with its lowering and its collective."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_axis_index(node):
            LOWERED.set(node, _lower_index)
        elif (move := move_of(node)) is not None:
            step = _step(move, node, mesh)
            LOWERED.set(node, _Lowered(step))
            if step is not None and step.collective.sends:
                val = VAL.of(node.all_input_nodes[0])
                COLLECTIVE.set(node, record_of(step, val, node, mesh.sizes))


def _step(move: Move, node: fx.Node, mesh: Mesh) -> ReshardStep | None:
    """The reshard step of a move; None where a move communicates nothing."""
    collective = move.collective
    if collective is None:
        return None
    alone = math.prod(mesh.shape[a] for a in collective.axes) == 1
    if alone and collective != Ppermute(collective.axes, ()):
        return None
    (source,) = node.all_input_nodes
    layouts = _Operand(LAYOUT.of(source), collective.axes, mesh.sizes)
    return ReshardStep(collective, *collective.accept(layouts))


class _Operand(CollectiveVisitor[tuple[Layout, Layout]]):
    """The layouts of an operand before and after a collective, given its layout along the other axes."""

    def __init__(self, layout: Layout, axes: tuple[str, ...], sizes: Sizes) -> None:
        self.dims, self.axes, self.sizes = layout.dims, axes, sizes
        self.rest = tuple(p for p in layout.pending if p[0] not in axes)
        self.ranks = math.prod(size for axis, size in sizes if axis in axes)

    def all_reduce(self, op: AllReduce) -> tuple[Layout, Layout]:
        return self._layout({}, op.reduction), self._layout({})

    def psum_scatter(self, op: PsumScatter) -> tuple[Layout, Layout]:
        whole, split = self._parted(op.to[0])
        return self._layout(whole, op.reduction), self._layout(split)

    def all_gather(self, op: AllGather) -> tuple[Layout, Layout]:
        dim = op.at[0]
        split, whole = (self._beside(axes, self.dims[dim]) for axes in (self.axes, ()))
        return self._layout({dim: split}), self._layout({dim: whole})

    def all_to_all(self, op: AllToAll) -> tuple[Layout, Layout]:
        """The ranks are the outer sub-dim of one dim; the parts are a sub-dim of the split dim."""
        (concat, _), (split, _) = op.at, op.to
        ranks, parts, part = Sub(self.ranks, self.axes), Sub(self.ranks), self._part(split)
        if split == concat:
            have = {split: (ranks, parts, *part)}
            want = {split: (parts, ranks, *part)}
        else:
            have = {split: (parts, *part), concat: (ranks, *self.dims[concat])}
            want = {split: (ranks, *part), concat: (parts, *self.dims[concat])}
        return self._layout(have), self._layout(want)

    def ppermute(self, op: Ppermute) -> tuple[Layout, Layout]:
        layout = self._layout({}, VARYING)
        return layout, layout

    def send(self, op: Send) -> tuple[Layout, Layout]:
        return self._layout({}), self._layout({})

    def slice(self, op: LocalSlice) -> tuple[Layout, Layout]:
        whole, split = self._parted(op.to[0])
        return self._layout(whole), self._layout(split)

    def _layout(self, dims: Mapping[int, Dim], pending: str | None = None) -> Layout:
        """The operand's layout with some dims replaced, and pending over the collective's axes."""
        replaced = tuple(dims.get(i, dim) for i, dim in enumerate(self.dims))
        added = () if pending is None else tuple((axis, pending) for axis in self.axes)
        return Layout(replaced, (*self.rest, *added))

    def _parted(self, dim: int) -> tuple[dict[int, Dim], dict[int, Dim]]:
        """A dim divided into parts: before (each rank has all) and after (each rank has one)."""
        part = self._part(dim)
        return {dim: self._beside((), part)}, {dim: self._beside(self.axes, part)}

    def _part(self, dim: int) -> Dim:
        """The sub-dims within each of the equal parts into which a move divides a dim."""
        size = math.prod(s.size for s in self.dims[dim])
        if not size:
            return (Sub(0, tuple(a for s in self.dims[dim] for a in s.axes)),)
        refined = refine(self.dims[dim], (self.ranks, size // self.ranks), self.sizes)
        assert refined is not None, "a move's rule keeps the parts whole"
        return refined[1]

    def _beside(self, axes: tuple[str, ...], part: Dim) -> Dim:
        """A dim of concatenated parts, one per rank along ``axes``; a single sub-dim where possible."""
        if len(part) == 1 and not part[0].axes:
            return (Sub(self.ranks * part[0].size, axes),)
        return (Sub(self.ranks, axes), *part)


# -- lowering -------------------------------------------------------------------------------------


class _Lowered:
    """The lowering of a move: its reshard step, between the layouts of the operand and the result."""

    def __init__(self, step: ReshardStep | None) -> None:
        self.step = step

    def __call__(self, low: Lowering, node: fx.Node) -> dict[Key, Value]:
        (source,) = node.all_input_nodes
        have, values = LAYOUT.of(source), low.env[source]
        if self.step is not None:
            values = _rekeyed(low, values, have, self.step.before)
            values = low.transport.step(low, self.step, values, VAL.of(source))
            have = self.step.after
        return _rekeyed(low, values, have, LAYOUT.of(node))

    def __repr__(self) -> str:
        return "" if self.step is None else self.step.kind


def _rekeyed(
    low: Lowering, values: dict[Key, Value], have: Layout, want: Layout
) -> dict[Key, Value]:
    """The same local values, keyed by the axes of another layout."""
    return {want.key(at): values[have.key(at)] for at in low.distinct([want])}


def _lower_index(low: Lowering, node: fx.Node) -> dict[Key, Value]:
    layout: Layout = LAYOUT.of(node)
    axes: Any = node.args[1]
    indices = {}
    for at in low.distinct([layout]):
        position = 0
        for a in axes:
            position = position * low.mesh.shape[a] + at[a]
        indices[layout.key(at)] = Value(low.emit.full([], position, VAL.of(node)))
    return indices
