"""Transport in one process: every rank's values are in one graph, and tensor operations move them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import fx

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.layout import Layout, chunk
from torchard.sharding.layouts.reshard import Step
from torchard.sharding.lowering.lower import Fetch, Key, Lowering, Value
from torchard.sharding.rules.blocks import take
from torchard.sharding.values.mesh import Mesh

__all__ = ["Lockstep", "Pieces", "members"]

Coords = dict[str, int]

_FOLD = {
    "sum": aten.add.Tensor,
    "max": aten.maximum.default,
    "min": aten.minimum.default,
}


def _position(layout: Layout, place: tuple[int, int]) -> int:
    """Where a sub-dim is when every sub-dim is a dim of its own."""
    dim, sub = place
    return sum(len(d) for d in layout.dims[:dim]) + sub


def members(mesh: Mesh, axes: Sequence[str], at: Coords) -> list[Coords]:
    """The coordinates that differ from one along some axes only, the first axis outermost."""
    ranges = (range(mesh.shape[a]) for a in axes)
    return [at | dict(zip(axes, index, strict=True)) for index in itertools.product(*ranges)]


class Pieces:
    """Local arithmetic on a step's values at one coordinate, with every sub-dim as a dim."""

    def __init__(self, low: Lowering, step: Step, mesh: Mesh) -> None:
        self.low, self.step, self.mesh = low, step, mesh
        self.fused = any(len(d) != 1 for d in step.before.dims)
        self.at = None if step.at is None else _position(step.before, step.at)
        self.to = None if step.to is None else _position(step.before, step.to)

    def shape(self, layout: Layout, at: Coords) -> list[int]:
        return [n for dim in layout.local_subs(at, self.mesh.shape) for n in dim]

    def open(self, x: fx.Node, at: Coords) -> fx.Node:
        """One dim per sub-dim."""
        return self.low.emit.view(x, self.shape(self.step.before, at)) if self.fused else x

    def close(self, x: fx.Node, at: Coords) -> fx.Node:
        """The dims of the value again."""
        shape = self.low.local_shape(self.step.after, at)
        if self.fused:
            return self.low.emit.view(x, shape)
        x.meta["shape"] = shape
        return x

    def range(self, layout: Layout, place: tuple[int, int], at: Coords) -> range:
        sub = layout.dims[place[0]][place[1]]
        return chunk(sub.size, sub.axes, at, self.mesh.shape)

    def cut(self, at: Coords) -> tuple[int, int]:
        """The run of its current part of ``to`` that a coordinate keeps."""
        assert self.step.to is not None
        before = self.range(self.step.before, self.step.to, at)
        after = self.range(self.step.after, self.step.to, at)
        return after.start - before.start, after.stop - before.start

    def members(self, at: Coords) -> list[Coords]:
        """The coordinates of the group, ordered with the first axis outermost."""
        return members(self.mesh, self.step.axes, at)

    def slice(self, x: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        return self.low.emit.call(aten.slice.Tensor, x, dim, start, stop)

    def cat(self, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        return (
            parts[0] if len(parts) == 1 else self.low.emit.call(aten.cat.default, list(parts), dim)
        )


class Lockstep:
    """All ranks in one process: collectives are tensor operations on the ranks' values."""

    late = False

    def step(
        self, low: Lowering, step: Step, values: dict[Key, Value], val: torch.Tensor
    ) -> dict[Key, Value]:
        low.tag_collective()
        pieces = Pieces(low, step, low.mesh)
        move = getattr(self, f"_{step.kind}")
        return {
            step.after.key(at): Value(pieces.close(move(pieces, values, at), at))
            for at in low.distinct([step.after])
        }

    def together(
        self, low: Lowering, moves: Sequence[tuple[Step, dict[Key, Value], torch.Tensor]]
    ) -> list[dict[Key, Value]]:
        """One after another: here nothing is gained by sending them at once."""
        return [self.step(low, step, values, val) for step, values, val in moves]

    def fetch(
        self, low: Lowering, what: Fetch, values: dict[Key, Value]
    ) -> dict[Key, Callable[[], list[fx.Node]]]:
        """Every block is here."""
        low.tag_collective()

        def found(at: Coords) -> list[fx.Node]:
            group = [what.layout.key(m) for m in members(low.mesh, what.axes, at)]
            return [
                take(low.emit.call, values[group[piece.block]].get(), what.dim, piece)
                for piece in what.wanted[low.position(at, what.axes)]
                if piece.block is not None
            ]

        places = low.distinct([what.layout])
        return {what.layout.key(at): functools.partial(found, at) for at in places}

    def _members(self, p: Pieces, values: dict[Key, Value], at: Coords) -> list[fx.Node]:
        return [p.open(values[p.step.before.key(m)].get(), m) for m in p.members(at)]

    def _fold(self, p: Pieces, parts: list[fx.Node]) -> fx.Node:
        total = parts[0]
        for part in parts[1:]:
            total = p.low.emit.call(_FOLD[p.step.op or "sum"], total, part)
        return total

    def _all_reduce(self, p: Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        return self._fold(p, self._members(p, values, at))

    def _psum_scatter(self, p: Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        assert p.to is not None
        start, stop = p.cut(at)
        parts = self._members(p, values, at)
        return self._fold(p, [p.slice(x, p.to, start, stop) for x in parts])

    def _all_gather(self, p: Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        assert p.at is not None
        return p.cat(self._members(p, values, at), p.at)

    def _all_to_all(self, p: Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        assert p.at is not None and p.to is not None
        start, stop = p.cut(at)
        parts = self._members(p, values, at)
        return p.cat([p.slice(x, p.to, start, stop) for x in parts], p.at)

    def _ppermute(self, p: Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        sender = dict((t, s) for s, t in p.step.pairs).get(p.members(at).index(at))
        if sender is None:
            own: fx.Node = values[p.step.before.key(at)].get()
            return p.low.emit.call(aten.zeros_like.default, own)
        sent: fx.Node = values[p.step.before.key(p.members(at)[sender])].get()
        return sent

    def _slice(self, p: Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        assert p.to is not None
        start, stop = p.cut(at)
        return p.slice(p.open(values[p.step.before.key(at)].get(), at), p.to, start, stop)
