"""Options of operations on local values, whose layouts along manual axes are fixed.

A local value that varies over an axis is *pending* over the axis in a way that no reduction completes:
every coordinate along the axis has its own value. The graph determines which values vary; planning does
not choose. Along the other axes a local value is a global value, and its operations have the options that
their rules give. So an option of a local operation is an option along the axes that are not manual, with
the varying axes added to its operands and results. If all axes are manual, one option remains. At the
edges of the region, between global and local values, manual axes that split a dim are the outermost axes
of that dim.
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
from torchard.sharding.layouts.options import Option, build, options
from torchard.sharding.manual.manual_collectives import Enter, Leave, Move, manual_around, move_of
from torchard.sharding.manual.varying_axes import manual_in_graph, varying_in_graph
from torchard.sharding.rules import Call
from torchard.sharding.values.constrain import constraint_spec
from torchard.sharding.values.mesh import Mesh, MeshError

__all__ = ["ManualConstraint", "check_local", "local_operations", "may_leave_as"]

Axes = frozenset[str]


@dataclass(frozen=True)
class ManualConstraint:
    """The layouts of one operation that are fixed along manual axes.

    Attributes:
        ins: the axes over which each operand varies.
        out: the axes over which the results vary.
        manual: the manual axes, which split no factor and pass no pending sum.
        move: the operation, if it is a shard_map collective.
    """

    ins: tuple[Axes, ...]
    out: Axes
    manual: Axes
    move: Move | None = None

    def applied(self, option: Option, sizes: Sizes) -> Option:
        """An option along the other axes, with what is fixed along manual ones."""
        return _with_varying(self, option, sizes)

    def free(self, option: Option, sizes: Sizes) -> Option:
        """The option along the other axes of which one is what `applied` gives."""
        free = build(option.rule, option.axes, option.passed, sizes)
        assert free is not None
        return free

    def among(self, found: Sequence[Option], sizes: Sizes) -> tuple[Option, ...]:
        """Those options along the other axes that use no manual one, with what is fixed along these."""
        return tuple(_with_varying(self, o, sizes) for o in found if not self.manual & _used(o))

    def options(
        self, rule: Rule, ins: Sequence[Layout], wished: Sequence[Layout], sizes: Sizes
    ) -> tuple[Option, ...]:
        """The options of the operation under this constraint; see ``options.options``."""
        return _options(self, rule, tuple(ins), tuple(wished), sizes)


def local_operations(graph: fx.Graph) -> dict[fx.Node, ManualConstraint]:
    """The constraint of every operation of a graph that takes or returns local values."""
    varying = varying_in_graph(graph)
    manual = manual_in_graph(graph, varying)
    constraints: dict[fx.Node, ManualConstraint] = {}
    for node in graph.nodes:
        move = move_of(node)
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if move is not None or any(varying[each] for each in (node, *node.all_input_nodes)):
            constraints[node] = ManualConstraint(
                ins=tuple(varying[operand] for operand in Call.of(node).operands),
                out=varying[node],
                manual=manual[node] | manual_around(node),
                move=move,
            )
    return constraints


# -- options --------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16384)
def _options(
    local: ManualConstraint, rule: Rule, ins: tuple[Layout, ...], wished: tuple[Layout, ...], sizes: Sizes
) -> tuple[Option, ...]:
    if local.move is not None:
        wished = (*wished, _as_before(local.manual, ins[0], rule, sizes))
    free = [o for o in options(rule, ins, wished, sizes) if not local.manual & _used(o)]
    return tuple(_with_varying(local, option, sizes) for option in free)


def _used(option: Option) -> Axes:
    return frozenset(a for axes in option.axes for a in axes) | {a for a, _ in option.passed}


def _with_varying(local: ManualConstraint, option: Option, sizes: Sizes) -> Option:
    """An option along the other axes, with the varying axes added and, at an edge, the manual splits."""
    ins = [layout.varying_over(axes) for layout, axes in zip(option.ins, local.ins, strict=True)]
    outs = [layout.varying_over(local.out) for layout in option.outs]
    if isinstance(local.move, Enter):
        ins = [_outside(local.move, outs[0], sizes).varying_over(local.ins[0])]
    elif isinstance(local.move, Leave):
        outs = [_outside(local.move, ins[0], sizes).varying_over(local.out)]
    return replace(option, ins=tuple(ins), outs=tuple(outs))


def _outside(edge: Enter | Leave, inside: Layout, sizes: Sizes) -> Layout:
    """The layout of the global value at an edge, given the local layout ``inside``."""
    table = dict(sizes)

    def joined(dim: Dim, entry: str) -> Dim:
        axes = tuple(a for a in entry.split(",") if entry and table[a] > 1)
        parts = math.prod(table[a] for a in axes)
        return merge((Sub(parts, axes), *dim), sizes) if axes else dim

    dims = tuple(joined(d, e) for d, e in zip(inside.dims, edge.entries, strict=True))
    return Layout(dims, inside.pending)


def may_leave_as(node: fx.Node, layout: Layout, sizes: Sizes) -> bool:
    """Whether a shard_map's result can have a layout, given the manual axes of its out_spec.

    Values that are not results of a shard_map can have any layout.
    """
    edge = move_of(node)
    if not isinstance(edge, Leave):
        return True
    shape = edge.transposed().shape(layout.shape)
    shards = zip(layout.dims, edge.counts, shape, strict=True)
    cut = [refine(dim, (parts, n), sizes) for dim, parts, n in shards]
    inside = [c[1] for c in cut if c is not None]
    split_by_spec = any(s.axes and set(s.axes) & set(edge.manual) for dim in inside for s in dim)
    whole = len(inside) == len(cut) and not split_by_spec
    return whole and _outside(edge, Layout(tuple(inside)), sizes) == layout


def _as_before(manual: Axes, operand: Layout, rule: Rule, sizes: Sizes) -> Layout:
    """A preferred layout of a move's result: dims split within each rank's shard like the operand's.

    The operand's own layout does not suggest this layout if the other axes are between or outside of the
    manual axes. In this case an all_to_all produces the layout; a gather would lose the split.
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
    """Run the checks that need the complete program.

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
                f"a shard around a shard_map is on {mesh}, but the shard_map is on {mapped}: one program "
                "runs on one mesh. Use the same mesh, or drop the shard, which a shard_map does not need."
            )


def _constrained(node: fx.Node, axis: str) -> str:
    return (
        f"constrain at {SOURCE.get(node)} is inside a shard_map and names {axis!r}, which is manual "
        "there: along it, each rank has a different value. Constrain global values, outside of the "
        "shard_map, or constrain along axes that axis_names leaves out."
    )


def _check_results(program: Program, graph: fx.Graph, varying: dict[fx.Node, Axes]) -> None:
    for leaf, value in zip(program.outputs, output_values(graph), strict=True):
        if varying[value]:
            axes = tuple(sorted(varying[value]))
            raise DerivativeError(
                f"the {leaf.path} varies over {axes}, although the value itself is the same along "
                "them: inside the shard_map it was combined with a varying value in code that cannot "
                "be tracked (an autograd.Function, or another transform). Make it varying before that: "
                f"pvary(x, {axes})."
            )
