"""Local values in a program of global ones: how they are laid out, and what their moves lower to.

A local value that varies over an axis is *pending* over it, in a way no reduction completes: every
coordinate along the axis has its own. With that, a program with a ``shard_map`` inside is an SPMD program
like any other: propagation finds the layouts of local operations fixed, the split into halves keeps local
residuals, and both runtimes lower local operations coordinate by coordinate. Only the moves are new, and
they are steps of the transports between layouts made for the purpose.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchard.functional.errors import DerivativeError
from torchard.functional.program import Program
from torchard.sharding.aliases import output_values
from torchard.sharding.collectives import record_of
from torchard.sharding.constrain import pinned_spec
from torchard.sharding.layout import VARYING, Layout, Sub
from torchard.sharding.lower import Key, Lowering, Value
from torchard.sharding.mesh import Mesh, MeshError
from torchard.sharding.moves import (
    Enter,
    Exchange,
    Extreme,
    Gather,
    GatherWhole,
    Leave,
    Move,
    Permute,
    Scatter,
    Slice,
    Sum,
    is_axis_index,
    move_of,
)
from torchard.sharding.options import Option
from torchard.sharding.reshard import Step
from torchard.sharding.rules import Call, rule_of
from torchard.sharding.rules.registry import results
from torchard.sharding.spec import P, layout_of
from torchard.sharding.varying import varying_in_graph

__all__ = ["attach_moves", "fixed_options"]

aten = torch.ops.aten
Axes = frozenset[str]


def _local(shape: tuple[int, ...], varying: Axes) -> Layout:
    pending = tuple((a, VARYING) for a in sorted(varying))
    return Layout(tuple((Sub(n),) for n in shape), pending)


def _edge(move: Enter | Leave, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """The layout of the global value at an edge of the region."""
    entries = (tuple(entry.split(",")) if entry else None for entry in move.entries)
    return layout_of(P(*entries), shape, mesh)


# -- for propagation ------------------------------------------------------------------------------


def fixed_options(graph: fx.Graph, program: Program, mesh: Mesh) -> dict[fx.Node, Option]:
    """The one option of each operation on local values: there is nothing to choose.

    Raises:
        DerivativeError: a gradient varies over ranks while its value does not.
        MeshError: ``constrain`` on a local value, or a shard_map on one mesh sharded on another.
    """
    varying = varying_in_graph(graph)
    _check_results(program, graph, varying)
    mapped = getattr(program.runtime, "mesh", mesh)
    found: dict[fx.Node, Option] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        move = move_of(node)
        if move is None and not varying[node]:
            continue
        if pinned_spec(node) is not None:
            raise MeshError(
                f"constrain at {node.meta.get('source')} is inside a shard_map, where every "
                "rank's values are its own; constrain global values, outside of it."
            )
        if mapped != mesh:
            raise MeshError(
                f"a shard of a shard_map is on {mesh}, the shard_map on {mapped}; one program runs on "
                "one mesh, and shard_map's needs no shard around it."
            )
        found[node] = _only_option(node, move, varying, mesh)
    return found


def _only_option(
    node: fx.Node, move: Move | None, varying: dict[fx.Node, Axes], mesh: Mesh
) -> Option:
    ins = tuple(_local(_shape(o), varying[o]) for o in Call.of(node).operands)
    outs = tuple(_local(tuple(v.shape), varying[node]) for v in results(node))
    if isinstance(move, Enter):
        ins = (_edge(move, _shape(node.all_input_nodes[0]), mesh),)
    elif isinstance(move, Leave):
        outs = (_edge(move, _shape(node), mesh),)
    rule = rule_of(Call.of(node))
    return Option(rule, ((),) * len(rule.sizes), (), ins, outs)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _check_results(program: Program, graph: fx.Graph, varying: dict[fx.Node, Axes]) -> None:
    for leaf, value in zip(program.outputs, output_values(graph), strict=True):
        if isinstance(value, fx.Node) and varying[value]:
            axes = tuple(sorted(varying[value]))
            raise DerivativeError(
                f"the {leaf.path} varies over {axes}, though its value is the same along them: "
                "inside the shard_map it met a varying value where that could not be seen (in an "
                "autograd.Function, or another transform). Make it varying before that: "
                f"pvary(x, {axes})."
            )


# -- after propagation ----------------------------------------------------------------------------


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
    rest = tuple(p for p in source.meta["layout"].pending if p[0] not in move.over)
    return make(move, _shape(source), rest)


Pending = tuple[tuple[str, str], ...]
Shape = tuple[int, ...]


def _dims(shape: Shape, pending: Pending, **split: Any) -> Layout:
    """A layout of whole dims, but for one: ``d`` of size ``n`` split over ``axes``."""
    dims = [(Sub(n),) for n in shape]
    if split:
        dims[split["d"]] = (Sub(split["n"], split["axes"]),)
    return Layout(tuple(dims), pending)


def _reduced(axes: tuple[str, ...], op: str, shape: Shape, rest: Pending) -> Step:
    before = _dims(shape, (*rest, *((a, op) for a in axes)))
    return Step("all_reduce", axes, before, _dims(shape, rest), op=op)


def _gathered(m: Any, shape: Shape, rest: Pending) -> Step:
    n = shape[m.dim] * m.size
    before = _dims(shape, rest, d=m.dim, n=n, axes=m.axes)
    after = _dims(shape, rest, d=m.dim, n=n, axes=())
    return Step("all_gather", m.axes, before, after, at=(m.dim, 0))


def _scattered(m: Any, shape: Shape, rest: Pending) -> Step:
    before = _dims(shape, (*rest, *((a, "sum") for a in m.axes)))
    after = _dims(shape, rest, d=m.dim, n=shape[m.dim], axes=m.axes)
    return Step("psum_scatter", m.axes, before, after, to=(m.dim, 0), op="sum")


def _sliced(m: Any, shape: Shape, rest: Pending) -> Step:
    after = _dims(shape, rest, d=m.dim, n=shape[m.dim], axes=m.axes)
    return Step("slice", m.axes, _dims(shape, rest), after, to=(m.dim, 0))


def _exchanged(m: Any, shape: Shape, rest: Pending) -> Step:
    """The ranks are a sub-dim in front of the concat dim, the parts one in front of the split dim."""
    part = shape[m.split] // m.size
    before = [[Sub(n)] for n in shape]
    before[m.split] = [Sub(m.size), Sub(part)]
    before[m.concat] = [Sub(m.size, m.axes), *before[m.concat]]
    after = [list(dim) for dim in before]
    to = (m.split, len(before[m.split]) - 2)
    after[m.concat][0] = Sub(m.size)
    after[m.split][to[1]] = Sub(m.size, m.axes)
    have, want = (Layout(tuple(map(tuple, dims)), rest) for dims in (before, after))
    return Step("all_to_all", m.axes, have, want, at=(m.concat, 0), to=to)


def _permuted(m: Any, shape: Shape, rest: Pending) -> Step:
    layout = _dims(shape, (*rest, *((a, VARYING) for a in m.axes)))
    pairs = tuple(zip(m.sources, m.targets, strict=True))
    return Step("ppermute", m.axes, layout, layout, pairs=pairs)


_STEPS: dict[type[Move], Callable[[Any, Shape, Pending], Step]] = {
    Sum: lambda m, shape, rest: _reduced(m.axes, "sum", shape, rest),
    Extreme: lambda m, shape, rest: _reduced(m.axes, m.which, shape, rest),
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
    axes: Any = node.args[0]
    found = {}
    for at in low.distinct([layout]):
        position = 0
        for a in axes:
            position = position * low.mesh.shape[a] + at[a]
        found[layout.key(at)] = Value(low.emit.full([], position, node.meta["val"]))
    return found
