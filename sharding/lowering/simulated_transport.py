"""Transport within one process: the values of all ranks are in one graph; tensor operations move them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import fx

from torchard.functional.programs.tags import SHAPE
from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.collective_ops import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectiveVisitor,
    LocalSlice,
    Ppermute,
    PsumScatter,
    Send,
    SubDim,
)
from torchard.sharding.layouts.layout import Layout, chunk
from torchard.sharding.layouts.reshard import ReshardStep
from torchard.sharding.lowering.lower import Fetch, Key, Lowering, Value
from torchard.sharding.rules.blocks import take
from torchard.sharding.values.mesh import Mesh

__all__ = ["Pieces", "SimulatedTransport", "members"]

Coords = dict[str, int]

_FOLD = {
    "sum": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}


def members(mesh: Mesh, axes: Sequence[str], at: Coords) -> list[Coords]:
    """The coordinates that differ from ``at`` along ``axes`` only, the first axis outermost."""
    ranges = (range(mesh.shape[a]) for a in axes)
    return [at | dict(zip(axes, index, strict=True)) for index in itertools.product(*ranges)]


class Pieces:
    """Local operations on the values of a reshard step, which has a dim for every sub-dim."""

    def __init__(self, low: Lowering, step: ReshardStep, mesh: Mesh) -> None:
        self.low, self.step, self.mesh = low, step, mesh
        self.fused = any(len(d) != 1 for d in step.before.dims)

    def dim(self, place: SubDim) -> int:
        """The position of a sub-dim when every sub-dim is a dim."""
        return sum(len(d) for d in self.step.before.dims[: place[0]]) + place[1]

    def shape(self, layout: Layout, at: Coords) -> list[int]:
        return [n for dim in layout.local_subs(at, self.mesh.shape) for n in dim]

    def open(self, x: fx.Node, at: Coords) -> fx.Node:
        """View a local value with one dim per sub-dim."""
        return self.low.emit.view(x, self.shape(self.step.before, at)) if self.fused else x

    def close(self, x: fx.Node, at: Coords) -> fx.Node:
        """View a result with the dims of the value; undoes `open`."""
        shape = self.low.local_shape(self.step.after, at)
        if self.fused:
            return self.low.emit.view(x, shape)
        SHAPE.set(x, shape)
        return x

    def range(self, layout: Layout, place: SubDim, at: Coords) -> range:
        sub = layout.dims[place[0]][place[1]]
        return chunk(sub.size, sub.axes, at, self.mesh.shape)

    def shard(self, x: fx.Node, to: SubDim, at: Coords) -> fx.Node:
        """Slice a group member's value along ``to``, to the shard that a coordinate receives."""
        before, after = self.range(self.step.before, to, at), self.range(self.step.after, to, at)
        return self.slice(x, self.dim(to), after.start - before.start, after.stop - before.start)

    def members(self, at: Coords) -> list[Coords]:
        """The coordinates of the group, ordered with the first axis outermost."""
        return members(self.mesh, self.step.axes, at)

    def slice(self, x: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        return self.low.emit.call(aten.slice.Tensor, x, dim, start, stop)

    def cat(self, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        return (
            parts[0] if len(parts) == 1 else self.low.emit.call(aten.cat.default, list(parts), dim)
        )


class SimulatedTransport:
    """All ranks in one process: collectives are tensor operations on the ranks' values."""

    late = False

    def step(
        self, low: Lowering, step: ReshardStep, values: dict[Key, Value], val: torch.Tensor
    ) -> dict[Key, Value]:
        low.tag_collective()
        pieces = Pieces(low, step, low.mesh)
        return {
            step.after.key(at): Value(
                pieces.close(step.collective.accept(_Received(pieces, values, at)), at)
            )
            for at in low.distinct([step.after])
        }

    def bucket(
        self, low: Lowering, moves: Sequence[tuple[ReshardStep, dict[Key, Value], torch.Tensor]]
    ) -> list[dict[Key, Value]]:
        """Run the steps one after another: within one process nothing is gained by merging them."""
        return [self.step(low, step, values, val) for step, values, val in moves]

    def fetch(
        self, low: Lowering, what: Fetch, values: dict[Key, Value]
    ) -> dict[Key, Callable[[], list[fx.Node]]]:
        """Slice the wanted pieces directly: every block is in this process."""
        low.tag_collective()

        def pieces_at(at: Coords) -> list[fx.Node]:
            group = [what.layout.key(m) for m in members(low.mesh, what.axes, at)]
            return [
                take(low.emit.call, values[group[piece.block]].get(), what.dim, piece)
                for piece in what.wanted[low.position(at, what.axes)]
                if piece.block is not None
            ]

        places = low.distinct([what.layout])
        return {what.layout.key(at): functools.partial(pieces_at, at) for at in places}


class _Received(CollectiveVisitor[fx.Node]):
    """The result of a collective at one coordinate, computed from the values of its group."""

    def __init__(self, p: Pieces, values: dict[Key, Value], at: Coords) -> None:
        self.p, self.values, self.at = p, values, at

    def _of(self, member: Coords) -> fx.Node:
        value: fx.Node = self.values[self.p.step.before.key(member)].get()
        return value

    def _parts(self) -> list[fx.Node]:
        return [self.p.open(self._of(m), m) for m in self.p.members(self.at)]

    def _fold(self, parts: list[fx.Node], op: str) -> fx.Node:
        total = parts[0]
        for part in parts[1:]:
            total = self.p.low.emit.call(_FOLD[op], total, part)
        return total

    def all_reduce(self, op: AllReduce) -> fx.Node:
        return self._fold(self._parts(), op.reduction)

    def psum_scatter(self, op: PsumScatter) -> fx.Node:
        return self._fold([self.p.shard(x, op.to, self.at) for x in self._parts()], op.reduction)

    def all_gather(self, op: AllGather) -> fx.Node:
        return self.p.cat(self._parts(), self.p.dim(op.at))

    def all_to_all(self, op: AllToAll) -> fx.Node:
        shards = [self.p.shard(x, op.to, self.at) for x in self._parts()]
        return self.p.cat(shards, self.p.dim(op.at))

    def ppermute(self, op: Ppermute) -> fx.Node:
        group = self.p.members(self.at)
        sender = dict((t, s) for s, t in op.pairs).get(group.index(self.at))
        if sender is None:
            return self.p.low.emit.call(aten.zeros_like.default, self._of(self.at))
        return self._of(group[sender])

    def send(self, op: Send) -> fx.Node:
        return self._of(self.at)

    def slice(self, op: LocalSlice) -> fx.Node:
        return self.p.shard(self.p.open(self._of(self.at), self.at), op.to, self.at)
