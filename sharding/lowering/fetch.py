"""Fetching pieces of other ranks' blocks by one all_to_all, whose splits are lists of pieces."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence

from torch import fx

from torchard.functional.torch_internals.operators import aten
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.lowering.carriers import exchanging
from torchard.sharding.lowering.channel import Channel
from torchard.sharding.lowering.lower import Fetch, Lowering
from torchard.sharding.rules.blocks import Piece, take

__all__ = ["fetch"]


def fetch(low: Lowering, request: Fetch, block: fx.Node) -> Callable[[], list[fx.Node]]:
    """Issue the exchange; return a function that waits for the pieces this rank wants, in order."""
    return _Exchange(low, request, block).begun()


class _Exchange:
    def __init__(self, low: Lowering, request: Fetch, block: fx.Node) -> None:
        self.low, self.request, self.block = low, request, block
        (at,) = low.coords
        layout: Layout = request.layout
        self.shape = list(low.local_shape(layout, at))
        self.here = low.position(at, request.axes)
        self.channel = Channel(low, request.axes)

    def slice(self, piece: Piece) -> fx.Node:
        taken: fx.Node = take(self.low.emit.call, self.block, self.request.dim, piece)
        return taken

    def begun(self) -> Callable[[], list[fx.Node]]:
        mine = [p for p in self.request.wanted[self.here] if p.block is not None]
        if all(p.block in (None, r) for r, parts in enumerate(self.request.wanted) for p in parts):
            return lambda: [self.slice(p) for p in mine]
        arrive = self._exchanged()

        def pieces() -> list[fx.Node]:
            arrived = arrive()
            return [
                self.slice(p) if p.block == self.here else next(arrived[p.block or 0]) for p in mine
            ]

        return pieces

    def _exchanged(self) -> Callable[[], list[Iterator[fx.Node]]]:
        """Send the pieces that others want; return a function that waits for those from each rank."""
        low, call = self.low, self.low.emit.call
        wanted = self.request.wanted
        to_send = [self._between(self.here, parts, r) for r, parts in enumerate(wanted)]
        to_receive = [self._between(r, wanted[self.here], self.here) for r in range(len(wanted))]
        sent = self._flat([self.slice(p) for parts in to_send for p in parts])
        carrier = exchanging(call, self.request.val.dtype)
        sizes = [
            [carrier.each * sum(self._elements(parts)) for parts in by_rank]
            for by_rank in (to_receive, to_send)
        ]
        issued = self.channel.issue("all_to_all_single", carrier.encode(sent), *sizes)
        flow = [piece for parts in to_receive for piece in parts]

        def arrive() -> list[Iterator[fx.Node]]:
            arrived = carrier.decode(self.channel.wait(issued))
            runs = call(aten.split_with_sizes.default, arrived, self._elements(flow))
            values = iter(
                [
                    low.emit.view(call(operator.getitem, runs, i), self._shape_of(piece))
                    for i, piece in enumerate(flow)
                ]
            )
            return [iter([next(values) for _ in parts]) for parts in to_receive]

        return arrive

    def _between(self, source: int, parts: Sequence[Piece], target: int) -> list[Piece]:
        """The pieces of one rank's block among those that another wants."""
        return [p for p in parts if p.block == source != target]

    def _flat(self, values: list[fx.Node]) -> fx.Node:
        call, val = self.low.emit.call, self.request.val
        if not values:
            return call(aten.full.default, [0], 0, dtype=val.dtype, device=val.device)
        return call(aten.cat.default, [self.low.emit.view(x, [-1]) for x in values], 0)

    def _shape_of(self, piece: Piece) -> list[int]:
        shape = list(self.shape)
        shape[self.request.dim + 1] = piece.size
        return shape

    def _elements(self, parts: Sequence[Piece]) -> list[int]:
        return [math.prod(self._shape_of(p)) for p in parts]
