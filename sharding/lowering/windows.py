"""Lowering of windows along a split dim: each rank fetches the elements of its windows that it lacks.

The exchange is one all_to_all in which most splits are empty. If every rank already holds its windows,
as for an aligned slice, nothing is sent; every rank can tell from the plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import COLLECTIVE, LAYOUT, PHASE, SCOPE, SOURCE, VAL
from torchard.sharding.layouts.collective_ops import AllToAll
from torchard.sharding.layouts.layout import Layout, Sizes
from torchard.sharding.layouts.tags import LOWERED
from torchard.sharding.lowering.lower import Fetch, Key, Lowering, Value
from torchard.sharding.rules.blocks import Window, assemble, fetched, pieces, window_of
from torchard.sharding.scheduling.collectives import Collective
from torchard.sharding.values.mesh import Mesh

__all__ = ["attach_windows"]

_NOTE = "neighbours' elements"


def attach_windows(graph: fx.Graph, mesh: Mesh) -> None:
    """Tag each window of split blocks in an SPMD graph with its lowering and its collective."""
    for node in graph.nodes:
        window = window_of(node) if node.op == "call_function" else None
        if window is None:
            continue
        (source,) = node.all_input_nodes
        layout: Layout = LAYOUT.of(source)
        axes = layout.dims[window.dim][0].axes
        forget(node, LOWERED, COLLECTIVE)
        if not axes:
            continue
        each = VAL.of(source).shape[window.dim + 1]
        moved = fetched(window, each)
        LOWERED.set(node, _Lowered(window, axes, each))
        if moved:
            COLLECTIVE.set(node, _record(node, layout, window, axes, moved, mesh.sizes))


def _record(
    node: fx.Node, layout: Layout, window: Window, axes: tuple[str, ...], moved: int, sizes: Sizes
) -> Collective:
    val = VAL.of(node.all_input_nodes[0])
    local = [Layout((dim,)).largest_local(dict(sizes)) for dim in layout.dims]
    local[window.dim : window.dim + 2] = [moved]
    return Collective(
        AllToAll.kind,
        axes,
        tuple(local),
        val.dtype,
        math.prod(local) * val.dtype.itemsize,
        source=SOURCE.get(node) or "",
        scope=SCOPE.get(node) or "",
        phase=PHASE.get(node) or "forward",
        note=_NOTE,
    )


@dataclass(frozen=True)
class _Lowered:
    """The lowering of one window; ``each`` is the size of a block."""

    window: Window
    axes: tuple[str, ...]
    each: int

    def __call__(self, low: Lowering, node: fx.Node) -> dict[Key, Value]:
        (source,) = node.all_input_nodes
        layout: Layout = LAYOUT.of(source)
        parts = pieces(self.window, self.each)
        request = Fetch(layout, self.window.dim, self.axes, parts, VAL.of(source))
        taken = low.transport.fetch(low, request, low.env[source])
        done: dict[Key, Value] = {}
        for at in low.distinct([layout]):
            wait = functools.partial(self._assembled, low, request, at, taken[layout.key(at)])
            done[layout.key(at)] = Value(wait=low.tagged(wait))
        if not low.transport.late:
            for value in done.values():
                value.get()
        elif fetched(self.window, self.each):
            low.in_flight.extend(done.values())
        return done

    def _assembled(
        self, low: Lowering, request: Fetch, at: dict[str, int], arrived: Callable[[], list[fx.Node]]
    ) -> Any:
        shape = low.local_shape(request.layout, at)
        own = request.wanted[low.position(at, self.axes)]
        return assemble(low.emit.call, arrived(), shape, request.val, self.window, own)

    def __repr__(self) -> str:
        return "windows"
