"""Transports: how a reshard's step moves data between coordinates.

``Lockstep`` has every rank's values in one graph and moves them with tensor operations. ``Wire`` has one
rank's values and moves them with functional collectives, issued where the value is ready and waited for
where it is first used.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchard.sharding.layout import Layout, chunk
from torchard.sharding.lower import Key, Lowering, Value
from torchard.sharding.mesh import Mesh
from torchard.sharding.reshard import Step

__all__ = ["Lockstep", "Wire"]

aten = torch.ops.aten
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


class _Pieces:
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
        ranges = (range(self.mesh.shape[a]) for a in self.step.axes)
        return [
            at | dict(zip(self.step.axes, index, strict=True))
            for index in itertools.product(*ranges)
        ]

    def slice(self, x: fx.Node, dim: int, start: int, stop: int) -> fx.Node:
        return self.low.emit.call(aten.slice.Tensor, x, dim, start, stop)

    def cat(self, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        return (
            parts[0] if len(parts) == 1 else self.low.emit.call(aten.cat.default, list(parts), dim)
        )


class Lockstep:
    """All ranks in one process: collectives are tensor operations on the ranks' values."""

    def step(
        self, low: Lowering, step: Step, values: dict[Key, Value], val: torch.Tensor, last: bool
    ) -> dict[Key, Value]:
        pieces = _Pieces(low, step, low.mesh)
        move = getattr(self, f"_{step.kind}")
        return {
            step.after.key(at): Value(pieces.close(move(pieces, values, at), at))
            for at in low.distinct([step.after])
        }

    def _members(self, p: _Pieces, values: dict[Key, Value], at: Coords) -> list[fx.Node]:
        return [p.open(values[p.step.before.key(m)].get(), m) for m in p.members(at)]

    def _fold(self, p: _Pieces, parts: list[fx.Node]) -> fx.Node:
        total = parts[0]
        for part in parts[1:]:
            total = p.low.emit.call(_FOLD[p.step.op or "sum"], total, part)
        return total

    def _all_reduce(self, p: _Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        return self._fold(p, self._members(p, values, at))

    def _psum_scatter(self, p: _Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        assert p.to is not None
        start, stop = p.cut(at)
        parts = self._members(p, values, at)
        return self._fold(p, [p.slice(x, p.to, start, stop) for x in parts])

    def _all_gather(self, p: _Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        assert p.at is not None
        return p.cat(self._members(p, values, at), p.at)

    def _all_to_all(self, p: _Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        assert p.at is not None and p.to is not None
        start, stop = p.cut(at)
        parts = self._members(p, values, at)
        return p.cat([p.slice(x, p.to, start, stop) for x in parts], p.at)

    def _ppermute(self, p: _Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        sender = dict((t, s) for s, t in p.step.pairs).get(p.members(at).index(at))
        if sender is None:
            own: fx.Node = values[p.step.before.key(at)].get()
            return p.low.emit.call(aten.zeros_like.default, own)
        sent: fx.Node = values[p.step.before.key(p.members(at)[sender])].get()
        return sent

    def _slice(self, p: _Pieces, values: dict[Key, Value], at: Coords) -> fx.Node:
        assert p.to is not None
        start, stop = p.cut(at)
        return p.slice(p.open(values[p.step.before.key(at)].get(), at), p.to, start, stop)


class Wire:
    """One rank: collectives are torch's functional ones over the mesh's process groups."""

    def step(
        self, low: Lowering, step: Step, values: dict[Key, Value], val: torch.Tensor, last: bool
    ) -> dict[Key, Value]:
        pieces = _Pieces(low, step, low.mesh)
        (at,) = low.coords
        x = pieces.open(values[step.before.key(at)].get(), at)
        if step.kind == "slice":
            start, stop = pieces.cut(at)
            assert pieces.to is not None
            done = pieces.close(pieces.slice(x, pieces.to, start, stop), at)
            return {step.after.key(at): Value(done)}
        started = _Started(pieces, at, val)
        finish = getattr(started, f"_{step.kind}")(x)
        tags = dict(low.emit.tags)

        def wait() -> fx.Node:
            now, low.emit.tags = low.emit.tags, tags
            try:
                return pieces.close(finish(), at)
            finally:
                low.emit.tags = now

        low.in_flight.append(Value(wait=wait))
        return {step.after.key(at): low.in_flight[-1]}


class _Started:
    """Issues one collective; each method gives back the function that waits for its result."""

    def __init__(self, p: _Pieces, at: Coords, val: torch.Tensor) -> None:
        self.p, self.at_, self.val = p, at, val
        self.call = p.low.emit.call
        self.group = p.mesh.group(p.step.axes).group_name
        self.size = math.prod(p.mesh.shape[a] for a in p.step.axes)

    def issue(self, name: str, x: fx.Node, *args: Any) -> fx.Node:
        op = getattr(torch.ops._c10d_functional, name).default
        return self.call(op, x, *args, self.group)

    def wait(self, x: fx.Node) -> fx.Node:
        return self.call(torch.ops._c10d_functional.wait_tensor.default, x)

    def contiguous(self, x: fx.Node) -> fx.Node:
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def front(self, x: fx.Node, dim: int) -> fx.Node:
        """A dim moved to the front, contiguous: what collectives on dim 0 need."""
        if dim:
            x = self.call(aten.movedim.int, x, dim, 0)
        return self.contiguous(x)

    def back(self, x: fx.Node, dim: int) -> fx.Node:
        return self.call(aten.movedim.int, x, 0, dim) if dim else x

    def sizes(self, layout: Layout, place: tuple[int, int]) -> list[int]:
        return [len(self.p.range(layout, place, m)) for m in self.p.members(self.at_)]

    # -- reductions -------------------------------------------------------------------------------

    def _all_reduce(self, x: fx.Node) -> Any:
        encode, decode = _encoding(self, self.p.step.op or "sum")
        sent = self.issue("all_reduce", self.contiguous_in(encode(x)), self.p.step.op or "sum")
        return lambda: decode(self.wait(sent))

    def contiguous_in(self, x: fx.Node) -> fx.Node:
        return self.call(aten.contiguous.default, x)

    def _psum_scatter(self, x: fx.Node) -> Any:
        p = self.p
        assert p.to is not None and p.step.to is not None
        dim, sizes = p.to, self.sizes(p.step.after, p.step.to)
        widest, own = max(sizes), len(p.range(p.step.after, p.step.to, self.at_))
        encode, decode = _encoding(self, p.step.op or "sum")
        x = self.front(encode(x), dim)
        if len(set(sizes)) > 1:
            x = self.padded(x, sizes, widest)
        sent = self.issue("reduce_scatter_tensor", x, p.step.op or "sum", self.size)

        def finish() -> fx.Node:
            part = self.wait(sent)
            if own != widest:
                part = p.slice(part, 0, 0, own)
            return self.back(decode(part), dim)

        return finish

    def padded(self, x: fx.Node, sizes: list[int], widest: int) -> fx.Node:
        """Uneven parts along dim 0, each brought to the widest's size."""
        parts = self.call(aten.split_with_sizes.default, x, sizes)
        rank = len(self.p.shape(self.p.step.before, self.at_))
        padded = []
        for i, size in enumerate(sizes):
            part = self.call(operator.getitem, parts, i)
            if size != widest:
                pad = [0] * (2 * rank - 1) + [widest - size]
                part = self.call(aten.constant_pad_nd.default, part, pad)
            padded.append(part)
        return self.call(aten.cat.default, padded, 0)

    # -- exchanges --------------------------------------------------------------------------------

    def _all_gather(self, x: fx.Node) -> Any:
        p = self.p
        assert p.at is not None and p.step.at is not None
        dim, sizes = p.at, self.sizes(p.step.before, p.step.at)
        widest, own = max(sizes), len(p.range(p.step.before, p.step.at, self.at_))
        encode, decode = _carrier(self)
        x = self.front(encode(x), dim)
        if own != widest:
            rank = len(p.shape(p.step.before, self.at_))
            pad = [0] * (2 * rank - 1) + [widest - own]
            x = self.call(aten.constant_pad_nd.default, x, pad)
        sent = self.issue("all_gather_into_tensor", x, self.size)

        def finish() -> fx.Node:
            whole = self.wait(sent)
            if len(set(sizes)) > 1:
                runs = [p.slice(whole, 0, i * widest, i * widest + n) for i, n in enumerate(sizes)]
                whole = p.cat(runs, 0)
            return self.back(decode(whole), dim)

        return finish

    def _all_to_all(self, x: fx.Node) -> Any:
        p = self.p
        assert p.step.at is not None and p.step.to is not None and p.at is not None
        at, to = p.at, p.to
        assert to is not None
        give, take = self.sizes(p.step.after, p.step.to), self.sizes(p.step.before, p.step.at)
        shape = p.shape(p.step.before, self.at_)
        shape[to] = len(p.range(p.step.after, p.step.to, self.at_))
        mine = math.prod(p.shape(p.step.before, self.at_)) // max(sum(give), 1)
        each = math.prod(n for i, n in enumerate(shape) if i != at)
        encode, decode = _carrier(self)
        flat = p.low.emit.view(self.front(encode(x), to), [-1] if sum(give) * mine else [0])
        splits_out, splits_in = [n * each for n in take], [n * mine for n in give]
        sent = self.issue("all_to_all_single", flat, splits_out, splits_in)

        def finish() -> fx.Node:
            runs = self.call(aten.split_with_sizes.default, self.wait(sent), splits_out)
            parts = []
            for i, n in enumerate(take):
                local = list(shape)
                local[at] = n
                local.insert(0, local.pop(to))
                part = p.low.emit.view(self.call(operator.getitem, runs, i), local)
                parts.append(self.back(part, to))
            whole: fx.Node = decode(p.cat(parts, at))
            return whole

        return finish


    def _ppermute(self, x: fx.Node) -> Any:
        """As an exchange in which most parts are empty; every rank takes part."""
        p, count = self.p, math.prod(self.p.shape(self.p.step.before, self.at_))
        own = p.members(self.at_).index(self.at_)
        give, take = [0] * self.size, [0] * self.size
        for source, target in p.step.pairs:
            if source == own:
                give[target] = count
            if target == own:
                take[source] = count
        encode, decode = _carrier(self)
        flat = p.low.emit.view(self.contiguous(encode(x)), [count])
        if not any(give):
            flat = p.slice(flat, 0, 0, 0)
        sent = self.issue("all_to_all_single", flat, take, give)

        def finish() -> fx.Node:
            arrived = self.wait(sent)
            if not any(take):
                return self.call(aten.zeros_like.default, x)
            done: fx.Node = decode(p.low.emit.view(arrived, p.shape(p.step.before, self.at_)))
            return done

        return finish


def _encoding(started: _Started, op: str) -> tuple[Any, Any]:
    """How values travel through a reduction that the transport does not know or gets wrong.

    gloo's maximum drops NaN. Floats are mapped to integers of the same order, with one NaN above (or,
    for a minimum, below) all numbers, and back.
    """
    call, dtype = started.call, started.val.dtype
    if op == "sum" or not (dtype.is_floating_point or dtype == torch.bool):
        return _carrier(started) if dtype == torch.bool else (_same, _same)
    if dtype == torch.bool:
        return _carrier(started)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bits = torch.int64 if wide == torch.float64 else torch.int32
    info = torch.iinfo(bits)
    nan = info.max if op == "max" else info.min + 1

    def order(x: fx.Node) -> fx.Node:
        """Two's complement order of sign-magnitude bits; its own inverse."""
        flipped = call(aten.bitwise_xor.Scalar, x, info.max)
        return call(aten.where.self, call(aten.lt.Scalar, x, 0), flipped, x)

    def encode(x: fx.Node) -> fx.Node:
        x = call(aten._to_copy.default, x, dtype=wide)
        ordered = order(call(aten.view.dtype, x, bits))
        return call(aten.masked_fill.Scalar, ordered, call(aten.isnan.default, x), nan)

    def decode(x: fx.Node) -> fx.Node:
        is_nan = call(aten.eq.Scalar, x, nan)
        value = call(aten.view.dtype, order(x), wide)
        value = call(aten.masked_fill.Scalar, value, is_nan, math.nan)
        return call(aten._to_copy.default, value, dtype=dtype)

    return encode, decode


def _carrier(started: _Started) -> tuple[Any, Any]:
    """Bools, which transports do not carry, travel as bytes."""
    dtype = started.val.dtype
    if dtype != torch.bool:
        return _same, _same

    def encode(x: fx.Node) -> fx.Node:
        return started.call(aten._to_copy.default, x, dtype=torch.uint8)

    def decode(x: fx.Node) -> fx.Node:
        return started.call(aten._to_copy.default, x, dtype=torch.bool)

    return encode, decode


def _same(x: fx.Node) -> fx.Node:
    return x
