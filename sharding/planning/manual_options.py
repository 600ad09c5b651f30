"""Operations on local values: which part of their layouts is settled, and which is to be chosen.

A local value that varies over an axis is *pending* over it, in a way no reduction completes: every
coordinate along the axis has its own. That is a fact of the graph. Along the other axes a local value is
a global one, and its operations have the options that their rules give them. So an option of a local
operation is one along the axes that are not manual, with what varies added to its operands and results;
where all axes are manual, one is left. Between global and local values, at the edges of the region, the
manual axes that split a dim are outside of whatever else does.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from torchard.functional.core.errors import DerivativeError
from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import SOURCE
from torchard.sharding.layouts.factors import Factors, Rule
from torchard.sharding.layouts.layout import Dim, Layout, Sizes, Sub, merge, refine
from torchard.sharding.layouts.options import Option, options
from torchard.sharding.manual.manual_collectives import Enter, Leave, Move, manual_around, move_of
from torchard.sharding.manual.varying_axes import manual_in_graph, varying_in_graph
from torchard.sharding.rules import Call
from torchard.sharding.values.constrain import constraint_spec
from torchard.sharding.values.mesh import Mesh, MeshError

__all__ = ["ManualConstraint", "check_local", "local_operations", "may_leave_as"]

Axes = frozenset[str]


@dataclass(frozen=True)
class ManualConstraint:
    """What is settled of one operation.

    Attributes:
        ins: the axes over which each operand varies.
        out: those over which the results do.
        manual: axes along which nothing is to be chosen: they split no factor, and no pending sum of
            theirs passes.
        move: the operation, if it is one of manual mode's own.
    """

    ins: tuple[Axes, ...]
    out: Axes
    manual: Axes
    move: Move | None = None

    def options(
        self, rule: Rule, ins: Sequence[Layout], wished: Sequence[Layout], sizes: Sizes
    ) -> tuple[Option, ...]:
        """As ``options.options``, for operands and results of which some part is settled."""
        return _options(self, rule, tuple(ins), tuple(wished), sizes)


def local_operations(graph: fx.Graph) -> dict[fx.Node, ManualConstraint]:
    """Every operation of a graph on local values, or that makes or ends them."""
    varying = varying_in_graph(graph)
    manual = manual_in_graph(graph, varying)
    found: dict[fx.Node, ManualConstraint] = {}
    for node in graph.nodes:
        move = move_of(node)
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if move is not None or varying[node]:
            found[node] = ManualConstraint(
                ins=tuple(varying[operand] for operand in Call.of(node).operands),
                out=varying[node],
                manual=manual[node] | manual_around(node),
                move=move,
            )
    return found


# -- options --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=65536)
def _options(
    local: ManualConstraint, rule: Rule, ins: tuple[Layout, ...], wished: tuple[Layout, ...], sizes: Sizes
) -> tuple[Option, ...]:
    if local.move is not None:
        wished = (*wished, _as_before(local.manual, ins[0], rule, sizes))
    free = [o for o in options(rule, ins, wished, sizes) if not local.manual & _used(o)]
    return tuple(_settled(local, option, sizes) for option in free)


def _used(option: Option) -> Axes:
    return frozenset(a for axes in option.axes for a in axes) | {a for a, _ in option.passed}


def _settled(local: ManualConstraint, option: Option, sizes: Sizes) -> Option:
    """An option along the other axes, with what varies; at an edge, with what is split by hand."""
    ins = [layout.varying_over(axes) for layout, axes in zip(option.ins, local.ins, strict=True)]
    outs = [layout.varying_over(local.out) for layout in option.outs]
    if isinstance(local.move, Enter):
        ins = [_outside(local.move, outs[0], sizes).varying_over(local.ins[0])]
    elif isinstance(local.move, Leave):
        outs = [_outside(local.move, ins[0], sizes).varying_over(local.out)]
    return replace(option, ins=tuple(ins), outs=tuple(outs))


def _outside(edge: Enter | Leave, inside: Layout, sizes: Sizes) -> Layout:
    """The layout of the global value at an edge, of which ranks have ``inside``."""
    table = dict(sizes)

    def joined(dim: Dim, entry: str) -> Dim:
        axes = tuple(a for a in entry.split(",") if entry and table[a] > 1)
        parts = math.prod(table[a] for a in axes)
        return merge((Sub(parts, axes), *dim), sizes) if axes else dim

    dims = tuple(joined(d, e) for d, e in zip(inside.dims, edge.entries, strict=True))
    return Layout(dims, inside.pending)


def may_leave_as(node: fx.Node, layout: Layout, sizes: Sizes) -> bool:
    """Whether the result of a shard_map can have a layout, whose manual part its spec has settled.

    Any other value can have any.
    """
    edge = move_of(node)
    if not isinstance(edge, Leave):
        return True
    shape = edge.transposed().shape(layout.shape)
    shards = zip(layout.dims, edge.counts, shape, strict=True)
    cut = [refine(dim, (parts, n), sizes) for dim, parts, n in shards]
    inside = [c[1] for c in cut if c is not None]
    settled = any(s.axes and set(s.axes) & set(edge.manual) for dim in inside for s in dim)
    whole = len(inside) == len(cut) and not settled
    return whole and _outside(edge, Layout(tuple(inside)), sizes) == layout


def _as_before(manual: Axes, operand: Layout, rule: Rule, sizes: Sizes) -> Layout:
    """A wish for the result of a move: its dims split, inside the ranks' parts, as the operand's were.

    The operand's own layout does not suggest it where the other axes split the parts from one another,
    or are outside of manual ones. An exchange mends that, and a gather would lose the split.
    """
    table = dict(sizes)

    def wish(factors: Factors, dim: Dim) -> Dim:
        *parts, part = (rule.sizes[f] for f in factors)
        axes = tuple(a for s in dim for a in s.axes if a not in manual)
        fits = part >= math.prod(table[a] for a in axes)
        return (*(Sub(n) for n in parts), Sub(part, axes if fits else ()))

    return Layout(tuple(wish(f, d) for f, d in zip(rule.outs[0], operand.dims, strict=True)))


# -- checks ---------------------------------------------------------------------------------------


def check_local(graph: fx.Graph, program: Program, mesh: Mesh) -> None:
    """What only the whole program shows to be wrong.

    Raises:
        DerivativeError: a gradient varies over ranks while its value does not.
        MeshError: ``constrain`` names an axis along which ranks have their own values, or a shard_map
            on one mesh is sharded on another.
    """
    varying = varying_in_graph(graph)
    _check_results(program, graph, varying)
    manual = manual_in_graph(graph, varying)
    mapped = getattr(program.runtime, "mesh", mesh)
    for node in graph.nodes:
        spec = constraint_spec(node)
        if spec is not None and (named := manual[node].intersection(spec.axes)):
            raise MeshError(_constrained(node, min(named)))
        if mapped != mesh and (varying[node] or move_of(node) is not None):
            raise MeshError(
                f"a shard of a shard_map is on {mesh}, the shard_map on {mapped}; one program runs on "
                "one mesh, and shard_map's needs no shard around it."
            )


def _constrained(node: fx.Node, axis: str) -> str:
    return (
        f"constrain at {SOURCE.get(node)} is inside a shard_map and names {axis!r}, which is "
        "manual there: every rank's values are its own along it. Constrain global values, outside of "
        "it, or along axes that axis_names leaves out."
    )


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
