"""The operator that marks a value as one that microbatches split: the identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.tags import VAL
from torchard.sharding.layouts.layout import Dim, Layout, Sub
from torchard.sharding.rules.registry import Call, letters, register_rule, spell

__all__ = ["AXIS", "Batch", "Mark", "drop_small", "insert_mark", "marked", "merge_marks"]

AXIS = "microbatch"
"""The mesh axis that lies in time."""

_library = torch.library.Library("torchard", "FRAGMENT")
_library.define("microbatch(Tensor x, int dim, int blocks, int steps) -> Tensor")


def _identity(x: torch.Tensor, dim: int, blocks: int, steps: int) -> torch.Tensor:
    return x.clone()


def _fake(x: torch.Tensor, dim: int, blocks: int, steps: int) -> torch.Tensor:
    return torch.empty_like(x)


def _vmap(info: Any, in_dims: Any, x: torch.Tensor, dim: int, blocks: int, steps: int) -> Any:
    return torch.ops.torchard.microbatch(x.movedim(in_dims[0], 0), dim + 1, blocks, steps), 0


_library.impl("microbatch", _identity, "CompositeExplicitAutograd")
torch.library.register_fake("torchard::microbatch", _fake, lib=_library)
torch.library.register_vmap("torchard::microbatch", _vmap, lib=_library)


def _same(call: Call) -> str:
    """The rule while microbatches of another number are planned."""
    dims = spell(letters(len(call.ins[0])))
    return f"{dims} -> {dims}"


register_rule(torch.ops.torchard.microbatch.default, text=_same)


@dataclass(frozen=True)
class Batch:
    """The dim of a leaf along which microbatches are slices.

    Attributes:
        dim: the dim, from the front.
        steps: the number of microbatches.
    """

    dim: int
    steps: int

    def batched(self) -> Batch:
        return replace(self, dim=self.dim + 1)


@dataclass(frozen=True)
class Mark:
    """What a marked node says: each of several blocks of a dim has a part in every microbatch."""

    dim: int
    blocks: int
    steps: int

    def layout(self, shape: Sequence[int]) -> Layout:
        """The layout over the axis."""
        dims: list[Dim] = [(Sub(n),) for n in shape]
        inner = Sub(shape[self.dim] // self.blocks, (AXIS,))
        dims[self.dim] = (inner,) if self.blocks == 1 else (Sub(self.blocks), inner)
        return Layout(tuple(dims))


def insert_mark(node: fx.Node, batch: Batch, blocks: int) -> None:
    """Mark an input, at the insertion point of its graph: its users read the marked value."""
    target = torch.ops.torchard.microbatch.default
    args = (node, batch.dim, blocks, batch.steps)
    marked = add_call(node, target, *args, val=VAL.of(node))
    node.replace_all_uses_with(marked, lambda user: user is not marked and user.op != "output")


def merge_marks(graph: fx.Graph) -> list[int]:
    """Make marks of marked values finer marks, and return the numbers of microbatches, outer ones first.

    A slice of a slice is a slice: where a function that is accumulated passes what it was given to one
    that is, the numbers of microbatches are multiplied.
    """
    marks = [node for node in graph.nodes if marked(node) is not None]
    for node in marks:
        (source,) = node.all_input_nodes
        outer, inner = marked(source), marked(node)
        assert inner is not None
        if outer is not None and outer.dim == inner.dim:
            steps = outer.steps * inner.steps
            for other in marks:
                if marked(other) == outer:
                    other.update_arg(3, steps)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    return list(dict.fromkeys(mark.steps for node in graph.nodes if (mark := marked(node))))


def drop_small(graph: fx.Graph, steps: int) -> None:
    """Drop marks of slices that have too few rows to be sliced again, or that are the batch itself."""
    for node in list(graph.nodes):
        mark = marked(node)
        if mark is None or mark.steps != steps:
            continue
        if steps == 1 or VAL.of(node).shape[mark.dim] % (mark.blocks * steps):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def marked(node: fx.Node) -> Mark | None:
    """The mark of a node; None for other nodes."""
    if node.op != "call_function" or node.target is not torch.ops.torchard.microbatch.default:
        return None
    dim, blocks, steps = node.args[1:]
    assert isinstance(dim, int) and isinstance(blocks, int) and isinstance(steps, int)
    return Mark(dim, blocks, steps)
