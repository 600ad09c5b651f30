"""Pins: what the user said of a leaf, and constraints as nodes of a graph."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from torchard.functional.programs.tagging import inherit, put
from torchard.functional.programs.tags import NAME, SCOPE, SOURCE, VAL
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.layouts.tags import SOFT
from torchard.sharding.manual.varying_axes import varying_in_graph
from torchard.sharding.planning.decision import CONSTRAINT
from torchard.sharding.values.constrain import number_of, pinned_spec
from torchard.sharding.values.mesh import Mesh
from torchard.sharding.values.spec import P, SpecError, layout_of

__all__ = ["SpecHint", "pin", "pin_named", "pin_rank", "pinned_layouts", "where_of"]


@dataclass(frozen=True)
class SpecHint:
    """The spec a leaf was given, and the leading dims that vmap has added since."""

    spec: P
    lead: int = 0

    def batched(self) -> SpecHint:
        return replace(self, lead=self.lead + 1)

    def layout(self, shape: Sequence[int], mesh: Mesh, path: str) -> Layout:
        inner = layout_of(self.spec, shape[self.lead :], mesh, path)
        for size in reversed(shape[: self.lead]):
            inner = inner.with_leading(size)
        return inner


def pin(graph: fx.Graph, node: fx.Node, hint: SpecHint, path: str, soft: bool) -> fx.Node:
    """A constraint on a node, which its users then see in its place. Soft: it is an input's own."""
    number = number_of(hint.spec.led(hint.lead))
    made = graph.call_function(torch.ops.torchard.constrain.default, (node, number))
    inherit(made, node)  # and not its name, by which it would be pinned again
    put(made, {VAL: VAL.of(node), SOFT: soft})
    SOURCE.setdefault(made, path)
    # An input that is returned as it came stays as it is.
    node.replace_all_uses_with(
        made, lambda user: user is not made and not (soft and user.op == "output")
    )
    return made


def pin_named(graph: fx.Graph, pins: Sequence[tuple[str, P]]) -> None:
    """Constraints on values by their names: each pattern over ``scope/name``, and its spec.

    Raises:
        SpecError: a pattern matches nothing.
    """
    for pattern, spec in pins:
        found = [n for n in graph.nodes if NAME.on(n) and matches(n, pattern)]
        if not found:
            names = sorted({_label(n) for n in graph.nodes if NAME.on(n)})
            raise SpecError(
                f"constrain_at[{pattern!r}] matches no named value; there are "
                f"{', '.join(names) or 'none: label one with name(x, ...)'}."
            )
        for node in found:
            with graph.inserting_after(node):
                pin(graph, node, SpecHint(spec), f"constrain_at[{pattern!r}]", soft=False)


def pin_rank(node: fx.Node, inputs: Mapping[fx.Node, tuple[Layout, int] | int]) -> int:
    """An input's own spec ranks as the input does."""
    given = inputs.get(node.all_input_nodes[0])
    return given[1] if SOFT.get(node) and isinstance(given, tuple) else CONSTRAINT


def pinned_layouts(graph: fx.Graph, mesh: Mesh) -> dict[fx.Node, Layout]:
    """The layouts that constraints give their nodes; what varies in manual mode varies still."""
    varying = varying_in_graph(graph)
    found: dict[fx.Node, Layout] = {}
    for node in graph.nodes:
        spec = pinned_spec(node)
        if spec is not None:
            layout = layout_of(spec, tuple(VAL.of(node).shape), mesh, where_of(node))
            found[node] = layout.varying_over(varying[node])
    return found


def where_of(node: fx.Node) -> str:
    return f"constrain at {SOURCE.get(node) or 'an unknown line'}: the value"


def _label(node: fx.Node) -> str:
    scope = SCOPE.get(node)
    return f"{scope}/{NAME.of(node)}" if scope else str(NAME.of(node))


def matches(node: fx.Node, pattern: str) -> bool:
    return fnmatch.fnmatchcase(_label(node), pattern) or NAME.of(node) == pattern
