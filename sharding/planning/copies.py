"""Copies of programs that are planned another way."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from torchard.functional.torch_internals import ProgramGraph
from torchard.sharding.decompositions.decompose import share_known
from torchard.sharding.planning.decision import Given
from torchard.sharding.planning.manual_options import local_operations
from torchard.sharding.rules import Call

__all__ = ["copy_graph", "given_in"]


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, and the map from its nodes to the copy's."""
    new = ProgramGraph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = new.node_copy(node, env.__getitem__)
        Call.copy(node, env)
    share_known(graph, new)
    return new, env


def given_in(given: Given, env: dict[fx.Node, fx.Node], graph: fx.Graph) -> Given:
    """The given constraints, transferred to the nodes of a copy."""
    return replace(
        given,
        inputs={env[n]: v for n, v in given.inputs.items()},
        constraints={env[n]: v for n, v in given.constraints.items()},
        ranks={env[n]: v for n, v in given.ranks.items()},
        relative={env[n]: v for n, v in given.relative.items()},
        local=local_operations(graph),
    )
