"""Transport over process groups: one rank's values, moved by torch's functional collectives.

A collective is issued where its value is ready and waited for where its result is first used.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.reshard import Step
from torchard.sharding.lowering.carriers import exchanging, moving, reducing
from torchard.sharding.lowering.channel import Channel
from torchard.sharding.lowering.fetch import fetch
from torchard.sharding.lowering.lower import Fetch, Key, Lowering, Value
from torchard.sharding.lowering.simulated_transport import Coords, Pieces

__all__ = ["Wire"]


class Wire:
    """One rank: collectives are torch's functional ones over the mesh's process groups."""

    late = True

    def step(
        self, low: Lowering, step: Step, values: dict[Key, Value], val: torch.Tensor
    ) -> dict[Key, Value]:
        pieces = Pieces(low, step, low.mesh)
        (at,) = low.coords
        x = pieces.open(values[step.before.key(at)].get(), at)
        if step.kind == "slice":
            start, stop = pieces.cut(at)
            assert pieces.to is not None
            done = pieces.close(pieces.slice(x, pieces.to, start, stop), at)
            return {step.after.key(at): Value(done)}
        started = _Started(pieces, at, val)
        low.in_flight.append(Value(wait=_later(started, started.begun(x))))
        return {step.after.key(at): low.in_flight[-1]}

    def together(
        self, low: Lowering, moves: Sequence[tuple[Step, dict[Key, Value], torch.Tensor]]
    ) -> list[dict[Key, Value]]:
        (at,) = low.coords
        begun = [_Started(Pieces(low, step, low.mesh), at, val) for step, _, val in moves]
        finish = _together(
            begun[0],
            [
                each.packed(each.p.open(values[step.before.key(at)].get(), at))
                for each, (step, values, _) in zip(begun, moves, strict=True)
            ],
        )
        done: list[dict[Key, Value]] = []
        for i, (each, (step, _, _)) in enumerate(zip(begun, moves, strict=True)):
            low.in_flight.append(Value(wait=_later(each, functools.partial(finish, i))))
            done.append({step.after.key(at): low.in_flight[-1]})
        return done

    def fetch(
        self, low: Lowering, what: Fetch, values: dict[Key, Value]
    ) -> dict[Key, Callable[[], list[fx.Node]]]:
        (at,) = low.coords
        key = what.layout.key(at)
        return {key: fetch(low, what, values[key].get())}


def _later(started: _Started, finish: Callable[[], fx.Node]) -> Callable[[], fx.Node]:
    return started.p.low.tagged(lambda: started.p.close(finish(), started.at_))


def _together(started: _Started, parts: Sequence[_Packed]) -> Callable[[int], fx.Node]:
    """One all_reduce or all_gather of several values; gives back what takes the i-th result out."""
    call, view = started.call, started.p.low.emit.view
    widths = [math.prod(part.shape) for part in parts]
    flat = [view(part.buffer, [n]) for part, n in zip(parts, widths, strict=True)]
    sent = started.send(call(aten.cat.default, flat, 0))
    copies = started.size if started.p.step.kind == "all_gather" else 1
    done: list[fx.Node] = []

    def taken(run: fx.Node, part: _Packed) -> fx.Node:
        shape = list(part.shape)
        if copies > 1:
            shape[0] *= copies
        return part.unpack(view(run, shape))

    def finish(i: int) -> fx.Node:
        """All at the first use: most are copied, and what they arrived in is free when all are."""
        if not done:
            arrived = view(started.channel.wait(sent), [copies, sum(widths)])
            runs = call(aten.split_with_sizes.default, arrived, widths, 1)
            done.extend(
                taken(call(operator.getitem, runs, j), part) for j, part in enumerate(parts)
            )
        return done[i]

    return finish


@dataclass(frozen=True)
class _Packed:
    """What a collective sends of one value, its shape, and how the answer becomes the result."""

    buffer: fx.Node
    shape: Sequence[int]
    unpack: Callable[[fx.Node], fx.Node]


class _Started:
    """Issues one collective and gives back the function that waits for its result."""

    def __init__(self, p: Pieces, at: Coords, val: torch.Tensor) -> None:
        self.p, self.at_, self.val = p, at, val
        self.call = p.low.emit.call
        self.channel = Channel(p.low, p.step.axes)
        self.size = math.prod(p.mesh.shape[a] for a in p.step.axes)

    def contiguous(self, x: fx.Node) -> fx.Node:
        return self.call(aten.contiguous.default, x)

    def front(self, x: fx.Node, dim: int) -> fx.Node:
        """A dim moved to the front, contiguous: what collectives on dim 0 need."""
        if dim:
            x = self.call(aten.movedim.int, x, dim, 0)
        return self.contiguous(x)

    def back(self, x: fx.Node, dim: int) -> fx.Node:
        return self.call(aten.movedim.int, x, 0, dim) if dim else x

    def sizes(self, layout: Layout, place: tuple[int, int]) -> list[int]:
        return [len(self.p.range(layout, place, m)) for m in self.p.members(self.at_)]

    def begun(self, x: fx.Node) -> Callable[[], fx.Node]:
        """Issue the collective of one value."""
        kind = self.p.step.kind
        if kind in ("all_to_all", "ppermute"):
            exchange: Callable[[], fx.Node] = getattr(self, f"_{kind}")(x)
            return exchange
        packed = self.packed(x)
        sent = self.send(packed.buffer)
        return lambda: packed.unpack(self.channel.wait(sent))

    def packed(self, x: fx.Node) -> _Packed:
        """What an all_reduce, a psum_scatter or an all_gather sends."""
        made: _Packed = getattr(self, f"_{self.p.step.kind}")(x)
        return made

    def send(self, buffer: fx.Node) -> fx.Node:
        op = self.p.step.op or "sum"
        if self.p.step.kind == "all_reduce":
            return self.channel.issue("all_reduce", buffer, op)
        if self.p.step.kind == "psum_scatter":
            return self.channel.issue("reduce_scatter_tensor", buffer, op, self.size)
        return self.channel.issue("all_gather_into_tensor", buffer, self.size)

    # -- reductions -------------------------------------------------------------------------------

    def _all_reduce(self, x: fx.Node) -> _Packed:
        encode, decode, _ = reducing(self.call, self.val.dtype, self.p.step.op or "sum")
        buffer = self.call(aten.contiguous.default, encode(x))
        return _Packed(buffer, self.p.shape(self.p.step.before, self.at_), decode)

    def _psum_scatter(self, x: fx.Node) -> _Packed:
        p = self.p
        assert p.to is not None and p.step.to is not None
        dim, sizes = p.to, self.sizes(p.step.after, p.step.to)
        widest, own = max(sizes), len(p.range(p.step.after, p.step.to, self.at_))
        encode, decode, _ = reducing(self.call, self.val.dtype, p.step.op or "sum")
        x = self.front(encode(x), dim)
        if len(set(sizes)) > 1:
            x = self.padded(x, sizes, widest)

        def unpack(part: fx.Node) -> fx.Node:
            if own != widest:
                part = p.slice(part, 0, 0, own)
            return self.back(decode(part), dim)

        return _Packed(x, self.at_front(p.step.before, dim, widest * len(sizes)), unpack)

    def at_front(self, layout: Layout, dim: int, size: int) -> list[int]:
        """The local shape with a dim moved to the front, where it has another size."""
        shape = self.p.shape(layout, self.at_)
        shape.pop(dim)
        return [size, *shape]

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

    def _all_gather(self, x: fx.Node) -> _Packed:
        p = self.p
        assert p.at is not None and p.step.at is not None
        dim, sizes = p.at, self.sizes(p.step.before, p.step.at)
        widest, own = max(sizes), len(p.range(p.step.before, p.step.at, self.at_))
        encode, decode, _ = moving(self.call, self.val.dtype)
        x = self.front(encode(x), dim)
        if own != widest:
            rank = len(p.shape(p.step.before, self.at_))
            pad = [0] * (2 * rank - 1) + [widest - own]
            x = self.call(aten.constant_pad_nd.default, x, pad)

        def unpack(whole: fx.Node) -> fx.Node:
            if len(set(sizes)) > 1:
                runs = [p.slice(whole, 0, i * widest, i * widest + n) for i, n in enumerate(sizes)]
                whole = p.cat(runs, 0)
            return self.back(decode(whole), dim)

        return _Packed(x, self.at_front(p.step.before, dim, widest), unpack)

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
        carrier = exchanging(self.call, self.val.dtype)
        flat = p.low.emit.view(self.front(x, to), [-1] if sum(give) * mine else [0])
        lengths = [n * each for n in take]
        sent = self.channel.issue(
            "all_to_all_single",
            carrier.encode(flat),
            [n * carrier.each for n in lengths],
            [n * mine * carrier.each for n in give],
        )

        def finish() -> fx.Node:
            arrived = carrier.decode(self.channel.wait(sent))
            runs = self.call(aten.split_with_sizes.default, arrived, lengths)
            parts = []
            for i, n in enumerate(take):
                local = list(shape)
                local[at] = n
                local.insert(0, local.pop(to))
                part = p.low.emit.view(self.call(operator.getitem, runs, i), local)
                parts.append(self.back(part, to))
            whole: fx.Node = p.cat(parts, at)
            return whole

        return finish

    def _ppermute(self, x: fx.Node) -> Any:
        """As an exchange in which most parts are empty; every rank takes part."""
        p, count = self.p, math.prod(self.p.shape(self.p.step.before, self.at_))
        own = p.members(self.at_).index(self.at_)
        carrier = exchanging(self.call, self.val.dtype)
        give, take = [0] * self.size, [0] * self.size
        for source, target in p.step.pairs:
            if source == own:
                give[target] = count * carrier.each
            if target == own:
                take[source] = count * carrier.each
        flat = carrier.encode(p.low.emit.view(self.contiguous(x), [count]))
        if not any(give):
            flat = p.slice(flat, 0, 0, 0)
        sent = self.channel.issue("all_to_all_single", flat, take, give)

        def finish() -> fx.Node:
            arrived = self.channel.wait(sent)
            if not any(take):
                return self.call(aten.zeros_like.default, x)
            done: fx.Node = p.low.emit.view(
                carrier.decode(arrived), p.shape(p.step.before, self.at_)
            )
            return done

        return finish
