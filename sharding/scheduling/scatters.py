"""Scatters of gradients: one per layer, as its gathers are.

The gradients of one layer's split parameters are summed and scattered by one call, issued when the last
of them is computed (FSDP, Zhao et al. 2023, §3). They are held until then: a layer's, as its weights are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.graphs import output_values
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import LOOP, RECOMPUTE, VAL
from torchard.sharding.layouts.collective_ops import PsumScatter
from torchard.sharding.layouts.tags import AFTER, BUCKET
from torchard.sharding.scheduling.bucket import common, first_use, merge, positions
from torchard.sharding.scheduling.collectives import op_of
from torchard.sharding.scheduling.gathers import layer_of

__all__ = ["scatter_by_layer"]


def scatter_by_layer(program: Program) -> None:
    """Merge the scatters of each layer's gradients; each bucket is issued when the one before arrived."""
    graph = program.graph
    layers = _layers(program)
    kinds: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in graph.nodes:
        if (LOOP.on(node) or node in layers) and (kind := _kind(node)) is not None:
            kinds.setdefault(kind, []).append(node)
    for scatters in kinds.values():
        earlier = None
        for members in list(_buckets(graph, scatters, layers)):
            if len(members) > 1:
                merge(members, members[-1])
                if earlier is not None:
                    AFTER.set(members[0], earlier)
                earlier = BUCKET.of(members[0])


def _layers(program: Program) -> dict[fx.Node, str]:
    """The layer of each scatter: that of the first result that is computed from it elementwise."""
    layers: dict[fx.Node, str] = {}
    for leaf, value in zip(program.outputs, output_values(program.graph), strict=True):
        path = program.inputs[leaf.of].path if leaf.of is not None else leaf.path
        seen, stack = {value}, [value]
        while stack:
            node = stack.pop()
            if isinstance(op_of(node), PsumScatter):
                layers.setdefault(node, layer_of(path))
                continue
            sources = {n for n in node.all_input_nodes if _size(n) == _size(value)} - seen
            seen |= sources
            stack.extend(sources)
    return layers


def _size(node: fx.Node) -> int | None:
    val = VAL.get(node)
    return val.numel() if isinstance(val, torch.Tensor) else None


def _kind(node: fx.Node) -> tuple[Any, ...] | None:
    """The key that members of a bucket must share; None for steps that are never merged."""
    op = op_of(node)
    if not isinstance(op, PsumScatter) or RECOMPUTE.get(node):
        return None
    return op.reduction, *common(node)


def _buckets(
    graph: fx.Graph, scatters: Sequence[fx.Node], layers: dict[fx.Node, str]
) -> Iterator[list[fx.Node]]:
    """Scatters of one layer, none of which is used before the last of them can be issued.

    A layer whose scatters come before and after all of another (the root's: head, then embeddings) has
    two buckets, so that its gradients are not held while others are computed.
    """
    at = positions(graph)
    own = [LOOP.get(node) or layers[node] for node in scatters]
    by_layer: dict[Any, list[int]] = {}
    for i, layer in enumerate(own):
        by_layer.setdefault(layer, []).append(i)
    ends = [(members[0], members[-1]) for members in by_layer.values()]

    def is_apart(i: int, j: int) -> bool:
        return any(i < first and last < j for first, last in ends)

    for places in by_layer.values():
        run: list[int] = []
        for i in places:
            due = min((first_use(scatters[j], at) for j in run), default=at[scatters[i]])
            if run and (at[scatters[i]] > due or is_apart(run[-1], i)):
                yield [scatters[j] for j in run]
                run = []
            run.append(i)
        yield [scatters[j] for j in run]
