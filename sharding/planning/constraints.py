"""Layout constraints: the spec that the user gave a leaf, and graph nodes that fix a layout."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from torchard.functional.core.arguments import nearest
from torchard.functional.core.scope_frames import Frame, path_of
from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.tags import FRAMES, NAME, SCOPE, SOURCE, VAL
from torchard.sharding.layouts.layout import Layout, Sizes, Sub, merge
from torchard.sharding.layouts.tags import SOFT
from torchard.sharding.manual.varying_axes import varying_in_graph
from torchard.sharding.planning.decision import CONSTRAINT, Relation
from torchard.sharding.values.constrain import constraint_spec, number_of
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P, SpecError, layout_of

__all__ = [
    "SpecHint",
    "check_named",
    "constrain_named",
    "constraint_layouts",
    "constraint_rank",
    "insert_constraint",
    "open_constraints",
    "where_of",
]


@dataclass(frozen=True)
class SpecHint:
    """The spec that a leaf was given, and the leading dims that vmap has added to the leaf since."""

    spec: P
    lead: int = 0

    def batched(self) -> SpecHint:
        return replace(self, lead=self.lead + 1)

    def layout(self, shape: Sequence[int], mesh: Mesh, path: str) -> Layout:
        inner = layout_of(self.spec, shape[self.lead :], mesh, path)
        for size in reversed(shape[: self.lead]):
            inner = inner.with_leading(size)
        return inner


def insert_constraint(node: fx.Node, hint: SpecHint, path: str, soft: bool) -> fx.Node:
    """Insert a constraint at the insertion point of a node's graph and redirect the node's users to it.

    Args:
        soft: the spec is an input's own, so an input that is returned unchanged is not constrained.
    """
    number = number_of(hint.spec.led(hint.lead))
    target = torch.ops.torchard.constrain.default
    # The constraint does not have the node's name: `constrain_named` would match and constrain it again.
    constrained = add_call(node, target, node, number, val=VAL.of(node))
    SOFT.set(constrained, soft)
    SOURCE.setdefault(constrained, path)
    # An input that is returned unchanged keeps its layout.
    node.replace_all_uses_with(
        constrained, lambda user: user is not constrained and not (soft and user.op == "output")
    )
    return constrained


def constrain_named(
    graph: fx.Graph, constraints: Sequence[tuple[str, P]], outer: tuple[Frame, ...] = ()
) -> dict[str, str]:
    """Constrain values by name, given pairs of a pattern over ``scope/name`` and a spec.

    Args:
        outer: the frames around the graph, if it is a loop's body.

    Returns:
        The name of each labelled value by its label, for `check_named`.
    """
    labels = {node: _label(node, outer) for node in graph.nodes if NAME.on(node)}
    for pattern, spec in constraints:
        for node, label in labels.items():
            if _matches(label, NAME.of(node), pattern):
                with graph.inserting_after(node):
                    insert_constraint(node, SpecHint(spec), f"constrain_at[{pattern!r}]", soft=False)
    return {label: NAME.of(node) for node, label in labels.items()}


def check_named(constraints: Sequence[tuple[str, P]], labels: Mapping[str, str]) -> None:
    """Check that each pattern matches a label.

    Raises:
        SpecError: a pattern matches none.
    """
    for pattern, _ in constraints:
        if not any(_matches(label, name, pattern) for label, name in labels.items()):
            names = sorted(labels)
            near = f"of {len(names)} labels the nearest are {', '.join(nearest(pattern, names))}"
            hint = near if names else "label one with name(x, ...)"
            raise SpecError(f"constrain_at[{pattern!r}] matches no labelled value; {hint}.")


def constraint_rank(node: fx.Node, inputs: Mapping[fx.Node, tuple[Layout, int] | int]) -> int:
    """The precedence of a constraint; an input's own spec has the precedence of the input."""
    given = inputs.get(node.all_input_nodes[0])
    return given[1] if SOFT.get(node) and isinstance(given, tuple) else CONSTRAINT


@dataclass(frozen=True)
class _OpenConstraint:
    """The layouts that a constraint with open dims allows.

    Attributes:
        fixed: the layout in which no open dim is split.
        open_dims: the open dims, which only the axes that split no other one may split.
    """

    fixed: Layout
    open_dims: tuple[int, ...]

    def __call__(self, layout: Layout, sizes: Sizes) -> Layout:
        """The allowed layout nearest to another one, which is that one if it is allowed."""
        dims = list(self.fixed.dims)
        for d in self.open_dims:
            free = (
                Sub(s.size, tuple(a for a in s.axes if a not in self.fixed.split_axes))
                for s in layout.dims[d]
            )
            dims[d] = merge(free, sizes)
        return Layout(tuple(dims), layout.pending)


def constraint_layouts(graph: fx.Graph, mesh: Mesh) -> dict[fx.Node, Layout]:
    """The layout of each constraint node that fixes all dims."""
    return {n: x for n, (spec, x) in _constraints(graph, mesh).items() if not spec.open_dims}


def open_constraints(graph: fx.Graph, mesh: Mesh) -> dict[fx.Node, Relation]:
    """For each constraint node with open dims, the layout nearest to another one that it allows."""
    return {
        node: _OpenConstraint(layout, spec.open_dims)
        for node, (spec, layout) in _constraints(graph, mesh).items()
        if spec.open_dims
    }


def _constraints(graph: fx.Graph, mesh: Mesh) -> dict[fx.Node, tuple[P, Layout]]:
    """The spec and the layout that each constraint node requires, in which no open dim is split.

    Values that vary over manual axes still vary.
    """
    varying = varying_in_graph(graph)
    found: dict[fx.Node, tuple[P, Layout]] = {}
    for node in graph.nodes:
        spec = constraint_spec(node)
        if spec is not None:
            shape, where = tuple(VAL.of(node).shape), where_of(node)
            layout = layout_of(spec, shape, mesh, where, may_be_open=True)
            found[node] = spec, layout.varying_over(varying[node]).homed(())
    return found


def where_of(node: fx.Node) -> str:
    """A name for a constrained value in messages."""
    return f"constrain at {SOURCE.get(node) or 'an unknown line'}: the value"


def _label(node: fx.Node, outer: tuple[Frame, ...] = ()) -> str:
    scope = path_of((*outer, *FRAMES.get(node, ()))) if outer else SCOPE.get(node)
    return f"{scope}/{NAME.of(node)}" if scope else str(NAME.of(node))


def matches(node: fx.Node, pattern: str) -> bool:
    """Whether a pattern matches the label of a node that has one."""
    return _matches(_label(node), NAME.of(node), pattern)


def _matches(label: str, name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(label, pattern) or name == pattern
