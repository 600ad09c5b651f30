"""Transport over process groups: one rank's values, moved by torch's functional collectives.

A collective is issued where its value is ready and waited for where its result is first used.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

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
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.reshard import ReshardStep
from torchard.sharding.lowering.carriers import exchanging, moving, reduced, reducing
from torchard.sharding.lowering.channel import Channel
from torchard.sharding.lowering.direct_sends import DirectChannel, UnderWay
from torchard.sharding.lowering.fetch import fetch
from torchard.sharding.lowering.lower import Fetch, Key, Lowering, Value
from torchard.sharding.lowering.simulated_transport import Coords, Pieces

__all__ = ["ProcessGroupTransport"]

_SMALL = 2**20  # bytes


class ProcessGroupTransport:
    """Transport of one rank by torch's functional collectives over the mesh's process groups.

    Args:
        direct: whether to send from rank to rank by isend and irecv, which compilers do not support.
    """

    late = True

    def __init__(self, direct: bool = False) -> None:
        self._under_way: UnderWay | None = {} if direct else None

    def step(
        self, low: Lowering, step: ReshardStep, values: dict[Key, Value], val: torch.Tensor
    ) -> dict[Key, Value]:
        (at,) = low.coords
        rank = _Rank(Pieces(low, step, low.mesh), values, at, val, self._under_way)
        message = step.collective.accept(rank)
        if message is None:
            return {}
        if isinstance(message, fx.Node):
            return {step.after.key(at): Value(rank.p.close(message, at))}
        sent = message.send(message.buffer)
        low.in_flight.append(
            rank.later(lambda: message.unpack(message.arrived(message.buffer, rank.channel.wait(sent))))
        )
        return {step.after.key(at): low.in_flight[-1]}

    def bucket(
        self, low: Lowering, moves: Sequence[tuple[ReshardStep, dict[Key, Value], torch.Tensor]]
    ) -> list[dict[Key, Value]]:
        """Send the messages of all steps as one; a derived class whose step differs sends each by it."""
        if type(self).step is not ProcessGroupTransport.step:
            return [self.step(low, *move) for move in moves]
        (at,) = low.coords
        ranks = [_Rank(Pieces(low, step, low.mesh), values, at, val) for step, values, val in moves]
        messages = [rank.p.step.collective.accept(rank) for rank in ranks]
        finish = _merged(ranks[0], messages)
        done: list[dict[Key, Value]] = []
        for i, rank in enumerate(ranks):
            low.in_flight.append(rank.later(functools.partial(finish, i)))
            done.append({rank.p.step.after.key(at): low.in_flight[-1]})
        return done

    def fetch(
        self, low: Lowering, what: Fetch, values: dict[Key, Value]
    ) -> dict[Key, Callable[[], list[fx.Node]]]:
        (at,) = low.coords
        key = what.layout.key(at)
        return {key: fetch(low, what, values[key].get())}


@dataclass(frozen=True)
class _Message:
    """The message that one collective sends for one value.

    Attributes:
        buffer: the values to send.
        send: issues the collective on a buffer.
        unpack: computes the result from the received buffer.
        shape: the shape of a row of the buffer; None if it cannot be concatenated with others.
        rows: the number of rows that are sent.
        copies: the number of rows that are received.
        arrived: what is computed of all that is sent and received, before it is unpacked.
    """

    buffer: fx.Node
    send: Callable[[fx.Node], fx.Node]
    unpack: Callable[[fx.Node], fx.Node]
    shape: Sequence[int] | None = None
    rows: int = 1
    copies: int = 1
    arrived: Callable[[fx.Node, fx.Node], fx.Node] = lambda sent, received: received


def _merged(rank: _Rank, messages: Sequence[_Message | fx.Node | None]) -> Callable[[int], fx.Node]:
    """Issue one collective for several values; return a function that gives the i-th result."""
    call, view = rank.call, rank.p.low.emit.view
    parts = [(m, m.shape) for m in messages if isinstance(m, _Message) and m.shape is not None]
    assert len(parts) == len(messages), "only messages of one contiguous buffer can be merged"
    widths = [math.prod(shape) for _, shape in parts]
    first, _ = parts[0]
    rows = [first.rows] if first.rows > 1 else []
    flat = [view(part.buffer, [*rows, n]) for (part, _), n in zip(parts, widths, strict=True)]
    buffer = call(aten.cat.default, flat, len(rows))
    sent = first.send(buffer)
    done: list[fx.Node] = []

    def unpacked(run: fx.Node, part: _Message, shape: Sequence[int]) -> fx.Node:
        arrived = list(shape)
        if part.copies > 1:
            arrived[0] *= part.copies
        return part.unpack(view(run, arrived))

    def finish(i: int) -> fx.Node:
        """Unpack all results at the first use, so that the buffer they arrived in can be freed."""
        if not done:
            received = first.arrived(buffer, rank.channel.wait(sent))
            arrived = view(received, [first.copies, sum(widths)])
            runs = call(aten.split_with_sizes.default, arrived, widths, 1)
            done.extend(
                unpacked(call(operator.getitem, runs, j), *part) for j, part in enumerate(parts)
            )
        return done[i]

    return finish


class _Rank(CollectiveVisitor["_Message | fx.Node | None"]):
    """This rank's message in a collective on one value; for a local slice, the slice itself.

    None: the rank takes no part.
    """

    def __init__(
        self,
        p: Pieces,
        values: dict[Key, Value],
        at: Coords,
        val: torch.Tensor,
        under_way: UnderWay | None = None,
    ) -> None:
        self.p, self.values, self.at_, self.val = p, values, at, val
        self.call, self.under_way = p.low.emit.call, under_way

    @functools.cached_property
    def channel(self) -> Channel:
        op, low = self.p.step.collective, self.p.low
        if not isinstance(op, Send) or op.source is None or op.to is None:
            return Channel(low, op.axes)
        pair = op.axes[0], min(op.source, op.to), max(op.source, op.to)
        group = None if low.mesh.virtual else low.mesh.pair(*pair)
        if self.under_way is None:
            return Channel(low, op.axes, group)
        ends = op.axes[0], op.source, op.to
        return DirectChannel(low, ends, group, self.under_way.setdefault(pair, deque()))

    @functools.cached_property
    def x(self) -> fx.Node:
        """The local value before the step, with every sub-dim as a dim."""
        return self.p.open(self.values[self.p.step.before.key(self.at_)].get(), self.at_)

    @functools.cached_property
    def before(self) -> list[int]:
        """The shape of `x`."""
        return self.p.shape(self.p.step.before, self.at_)

    @functools.cached_property
    def members(self) -> Sequence[Coords]:
        """The ranks that take part, in the order of the group."""
        return self.p.members(self.at_)

    def later(self, finish: Callable[[], fx.Node]) -> Value:
        """The value that ``finish`` will compute when it is first used."""
        return Value(wait=self.p.low.tagged(lambda: self.p.close(finish(), self.at_)))

    def contiguous(self, x: fx.Node) -> fx.Node:
        return self.call(aten.contiguous.default, x)

    def front(self, x: fx.Node, dim: int) -> fx.Node:
        """Move a dim to the front, contiguous, as collectives along dim 0 require."""
        if dim:
            x = self.call(aten.movedim.int, x, dim, 0)
        return self.contiguous(x)

    def back(self, x: fx.Node, dim: int) -> fx.Node:
        return self.call(aten.movedim.int, x, 0, dim) if dim else x

    def sizes(self, layout: Layout, place: SubDim) -> list[int]:
        return [len(self.p.range(layout, place, m)) for m in self.members]

    def at_front(self, dim: int, size: int) -> list[int]:
        """The local shape with a dim moved to the front and resized to ``size``."""
        return [size, *self.before[:dim], *self.before[dim + 1 :]]

    def padded(self, x: fx.Node, size: int, widest: int) -> fx.Node:
        """Pad dim 0 of a shard to the size of the largest shard."""
        if size == widest:
            return x
        pad = [0] * (2 * len(self.before) - 1) + [widest - size]
        return self.call(aten.constant_pad_nd.default, x, pad)

    def slice(self, op: LocalSlice) -> fx.Node:
        return self.p.shard(self.x, op.to, self.at_)

    # -- reductions -------------------------------------------------------------------------------

    def all_reduce(self, op: AllReduce) -> _Message:
        encode, decode, _ = reducing(self.call, self.val.dtype, op.reduction)
        x = self.contiguous(encode(self.x))
        if self.by_exchange and self.is_small and op.reduction == "sum" and len(self.members) == 2:
            return self.sum_of_two(x, decode)

        def send(buffer: fx.Node) -> fx.Node:
            return self.channel.issue("all_reduce", buffer, op.reduction)

        return _Message(x, send, decode, self.before)

    @property
    def by_exchange(self) -> bool:
        """Whether ranks exchange values and add them up themselves, as is faster with gloo."""
        return self.val.device.type == "cpu"

    @property
    def is_small(self) -> bool:
        """Whether what is sent, of all merged values, takes no longer than a latency or two."""
        return self.p.low.record is not None and self.p.low.record.bytes <= _SMALL

    def pairs(self, x: fx.Node) -> fx.Node:
        """Complex numbers as pairs of real ones: gloo does not exchange them."""
        return self.call(aten.view_as_real.default, x) if self.val.dtype.is_complex else x

    def sum_of_two(self, x: fx.Node, decode: Callable[[fx.Node], fx.Node]) -> _Message:
        """Both ranks send their values and add up the two: as many bytes as by an all_reduce.

        gloo's all_reduce takes several messages one after another, so that of few bytes it takes up to
        five times as long (torch 2.13); but it needs no memory for what is received.
        """
        view, own = self.p.low.emit.view, self.members.index(self.at_)
        other = [own, 1 - own]  # the rows for, and from, either rank

        def send(buffer: fx.Node) -> fx.Node:
            row = self.pairs(view(buffer, [1, -1]))
            return self.channel.issue("all_to_all_single", row, other, other)

        def arrived(sent: fx.Node, received: fx.Node) -> fx.Node:
            if self.val.dtype.is_complex:
                received = self.call(aten.view_as_complex.default, received)
            return self.call(aten.add.Tensor, received, view(sent, [1, -1]))

        def unpack(total: fx.Node) -> fx.Node:
            return decode(view(total, self.before))

        return _Message(x, send, unpack, self.before, arrived=arrived)

    def psum_scatter(self, op: PsumScatter) -> _Message:
        """Scatter a sum; on CPUs by an all_to_all, after which each rank adds up its own shard.

        gloo's reduce_scatter is an all_reduce: it sends twice as much (torch 2.13).
        """
        dim, sizes = self.p.dim(op.to), self.sizes(self.p.step.after, op.to)
        widest, own = max(sizes), len(self.p.range(self.p.step.after, op.to, self.at_))
        encode, decode, _ = reducing(self.call, self.val.dtype, op.reduction)
        x = self.front(encode(self.x), dim)
        if len(set(sizes)) > 1:
            parts = self.call(aten.split_with_sizes.default, x, sizes)
            even = [
                self.padded(self.call(operator.getitem, parts, i), n, widest)
                for i, n in enumerate(sizes)
            ]
            x = self.call(aten.cat.default, even, 0)

        count, part = len(sizes), self.at_front(dim, widest)
        x = self.p.low.emit.view(x, [count, math.prod(part)])

        def send(buffer: fx.Node) -> fx.Node:
            if not self.by_exchange:
                return self.channel.issue("reduce_scatter_tensor", buffer, op.reduction, count)
            return self.channel.issue("all_to_all_single", self.pairs(buffer), [1] * count, [1] * count)

        def arrived(_: fx.Node, received: fx.Node) -> fx.Node:
            if not self.by_exchange:
                return received
            return reduced(self.call, received, self.val.dtype, op.reduction)

        def unpack(received: fx.Node) -> fx.Node:
            shard = self.p.low.emit.view(received, part)
            if own != widest:
                shard = self.p.slice(shard, 0, 0, own)
            return self.back(decode(shard), dim)

        return _Message(x, send, unpack, [math.prod(part)], rows=count, arrived=arrived)

    # -- exchanges --------------------------------------------------------------------------------

    def all_gather(self, op: AllGather) -> _Message:
        dim, sizes = self.p.dim(op.at), self.sizes(self.p.step.before, op.at)
        widest, own = max(sizes), len(self.p.range(self.p.step.before, op.at, self.at_))
        encode, decode, _ = moving(self.call, self.val.dtype)
        x = self.padded(self.front(encode(self.x), dim), own, widest)

        def send(buffer: fx.Node) -> fx.Node:
            return self.channel.issue("all_gather_into_tensor", buffer, len(sizes))

        def unpack(whole: fx.Node) -> fx.Node:
            if len(set(sizes)) > 1:
                runs = [
                    self.p.slice(whole, 0, i * widest, i * widest + n) for i, n in enumerate(sizes)
                ]
                whole = self.p.cat(runs, 0)
            return self.back(decode(whole), dim)

        return _Message(x, send, unpack, self.at_front(dim, widest), copies=len(sizes))

    def all_to_all(self, op: AllToAll) -> _Message:
        at, to = self.p.dim(op.at), self.p.dim(op.to)
        give, take = self.sizes(self.p.step.after, op.to), self.sizes(self.p.step.before, op.at)
        shape = list(self.before)
        shape[to] = len(self.p.range(self.p.step.after, op.to, self.at_))
        mine = math.prod(self.before) // max(sum(give), 1)
        each = math.prod(n for i, n in enumerate(shape) if i != at)
        carrier = exchanging(self.call, self.val.dtype)
        view = self.p.low.emit.view
        flat = view(self.front(self.x, to), [-1] if sum(give) * mine else [0])
        lengths = [n * each for n in take]

        def send(buffer: fx.Node) -> fx.Node:
            arrive = [n * carrier.each for n in lengths]
            leave = [n * mine * carrier.each for n in give]
            return self.channel.issue("all_to_all_single", buffer, arrive, leave)

        def unpack(arrived: fx.Node) -> fx.Node:
            runs = self.call(aten.split_with_sizes.default, carrier.decode(arrived), lengths)
            parts = []
            for i, n in enumerate(take):
                local = list(shape)
                local[at] = n
                local.insert(0, local.pop(to))
                part = view(self.call(operator.getitem, runs, i), local)
                parts.append(self.back(part, to))
            return self.p.cat(parts, at)

        return _Message(carrier.encode(flat), send, unpack)

    def send(self, op: Send) -> _Message | fx.Node | None:
        """Send directly, or by a broadcast over the group of sender and receiver, or over the axis."""
        (axis,) = op.axes
        here = self.at_[axis]
        if op.source is None:
            return self.x if here == op.to else None
        if op.to is not None and here not in (op.source, op.to):
            return None
        root = op.source if op.to is None else int(op.source > op.to)
        encode, decode, _ = moving(self.call, self.val.dtype)
        if here == op.source:
            x = self.contiguous(self.x)
        else:
            options = {"dtype": self.val.dtype, "device": self.val.device}
            x = self.call(aten.empty.memory_format, self.before, **options)
        channel, buffer = self.channel, encode(x)
        if not isinstance(channel, DirectChannel):
            return _Message(buffer, lambda x: channel.issue("broadcast", x, root), decode)
        if here == op.source:
            channel.send(buffer, 1 - root)
            return None
        return _Message(buffer, lambda x: channel.receive(x, root), decode)

    def ppermute(self, op: Ppermute) -> _Message:
        """Issue an all_to_all in which most splits are empty; every rank of the group takes part."""
        count, group = math.prod(self.before), self.members
        own = group.index(self.at_)
        carrier = exchanging(self.call, self.val.dtype)
        give, take = [0] * len(group), [0] * len(group)
        for source, target in op.pairs:
            if source == own:
                give[target] = count * carrier.each
            if target == own:
                take[source] = count * carrier.each
        flat = carrier.encode(self.p.low.emit.view(self.contiguous(self.x), [count]))
        if not any(give):
            flat = self.p.slice(flat, 0, 0, 0)

        def send(buffer: fx.Node) -> fx.Node:
            return self.channel.issue("all_to_all_single", buffer, take, give)

        def unpack(arrived: fx.Node) -> fx.Node:
            if not any(take):
                return self.call(aten.zeros_like.default, self.x)
            return self.p.low.emit.view(carrier.decode(arrived), self.before)

        return _Message(flat, send, unpack)
