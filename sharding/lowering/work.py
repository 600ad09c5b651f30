"""The work of a plan: the work of the busiest rank, and the axes that split it.

Counted on the SPMD program, from layouts: an operation's local shapes are those of the largest shards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.costs.flops import flops_of
from torchard.functional.costs.traffic import bytes_touched
from torchard.functional.programs.program import Program
from torchard.functional.programs.records import AxisWork, Work
from torchard.functional.programs.tags import LAYOUT, STEP, VAL
from torchard.functional.remat.liveness import as_run, writes_of
from torchard.functional.torch_internals import ProgramGraph
from torchard.sharding.layouts.layout import Layout
from torchard.sharding.manual.manual_collectives import move_of
from torchard.sharding.rules.blocks import MOVED_AS_BLOCKS
from torchard.sharding.values.mesh import Mesh

__all__ = ["Operation", "mesh_work", "operations_of"]


@dataclass(frozen=True)
class Operation:
    """One operation, with its global shapes and with those of the busiest rank.

    Attributes:
        copies: the number of distinct global operations: one per coordinate along manual axes.
        split: the axes along which ranks compute different parts, or some compute nothing.
        home: the stages that compute it; () for all ranks.
    """

    whole: fx.Node
    local: fx.Node
    copies: int
    split: frozenset[str]
    home: tuple[tuple[str, int], ...]


def mesh_work(program: Program, mesh: Mesh) -> Work:
    """The work of an SPMD program."""
    runs = as_run(program)  # kernels do the same arithmetic, and touch less memory
    operations, moving = (list(operations_of(p.graph, mesh)) for p in (program, runs))
    writes = writes_of(runs)
    done = [flops_of(o.whole) * o.copies for o in operations]
    touched = [bytes_touched(o.whole, writes.get(o.whole)) * o.copies for o in moving]
    return Work(
        flops=sum(done),
        bytes=sum(touched),
        rank_flops=_busiest(operations, lambda o: flops_of(o.local)),
        rank_bytes=_busiest(moving, lambda o: bytes_touched(o.local, writes.get(o.whole))),
        axes=tuple(
            AxisWork(axis, size, _part(done, operations, axis), _part(touched, moving, axis))
            for axis, size in mesh.shape.items()
        ),
    )


def _busiest(operations: Sequence[Operation], cost: Callable[[Operation], int]) -> int:
    """The cost of the busiest rank's operations."""
    at: Counter[tuple[tuple[str, int], ...]] = Counter()
    for operation in operations:
        at[operation.home] += cost(operation)
    everywhere = at.pop((), 0)
    return everywhere + max(at.values(), default=0)


def _part(each: Sequence[int], operations: Sequence[Operation], axis: str) -> float:
    split = sum(n for n, o in zip(each, operations, strict=True) if axis in o.split)
    return split / max(sum(each), 1)


def operations_of(graph: fx.Graph, mesh: Mesh) -> Iterator[Operation]:
    """The operations that compute; without collectives and moves of blocks and windows."""
    local = ProgramGraph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        env[node] = local.node_copy(node, env.__getitem__)
        if node.op == "output":
            continue
        VAL.set(env[node], _local_value(node, mesh))
        moves = STEP.on(node) or node.target in MOVED_AS_BLOCKS or move_of(node) is not None
        if node.op != "call_function" or not LAYOUT.on(node) or moves:
            continue
        layouts = [layout for n in (node, *node.all_input_nodes) for layout in _layouts(n)]
        own = {a for layout in layouts for a in layout.varying}
        split = {a for layout in layouts for a in layout.split_axes} | own
        copies = math.prod(mesh.shape[a] for a in own)
        home = _layouts(node)[0].home if _layouts(node) else ()
        yield Operation(node, env[node], copies, frozenset({*split, *dict(home)}), home)


def _layouts(node: fx.Node) -> tuple[Layout, ...]:
    layout = LAYOUT.get(node, ())
    return layout if isinstance(layout, tuple) else (layout,)


def _local_value(node: fx.Node, mesh: Mesh) -> Any:
    """A node's value with the shapes of the largest shards, on the meta device."""
    layouts = iter(_layouts(node))

    def local(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        layout = next(layouts, None)
        shape = value.shape if layout is None else layout.largest_shape(mesh.shape)
        return torch.empty(shape, dtype=value.dtype, device="meta")

    value = VAL.get(node)
    return type(value)(map(local, value)) if isinstance(value, (tuple, list)) else local(value)
