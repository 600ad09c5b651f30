"""Updates in place: in the memory of copies, which are not made where the originals may be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import LAYOUT, SHAPE, VAL
from torchard.functional.programs.views import is_dense
from torchard.functional.torch_internals.operators import aten
from torchard.functional.updates.kernels import Update

__all__ = ["UpdateInPlace", "in_copies", "written_operands"]

Row = Sequence[Tensor]
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class UpdateInPlace:
    """The target of a node that computes an update in the memory of its bases, and returns these."""

    update: Update
    namespace: ClassVar[str] = "torchard"  # whose operators keep none of their operands

    @property
    def __name__(self) -> str:
        return self.update.__name__

    def __call__(
        self, bases: Sequence[Tensor], grads: Sequence[Tensor], *shared: Any
    ) -> tuple[Tensor, ...]:
        plain = all(type(x) in _PLAIN for x in (*bases, *grads)) and not internals.records_operations()
        rows: list[Row] = [bases[i :: len(grads)] for i in range(len(grads))]
        given: list[tuple[Row, Tensor]] = []
        with torch.no_grad():
            for row, grad in zip(rows, grads, strict=True):
                if not (plain and _is_simple(row)):
                    for base, value in zip(row, self.update.one(*row, grad, *shared), strict=True):
                        base.copy_(value)
                elif grad.numel():
                    given.append((row, _like(row[0], grad)))
            if given:
                trees = list(zip(*(row for row, _ in given), strict=True))
                self.update.write(trees, [grad for _, grad in given], *shared)
        return tuple(bases)


def _is_simple(row: Row) -> bool:
    """Whether tensors hold their elements in one order, without gaps: kernels do not read strides."""
    if all(x.is_contiguous() for x in row):
        return not any(x.is_neg() for x in row)
    strides = row[0].stride()
    return is_dense(row[0]) and all(x.stride() == strides and not x.is_neg() for x in row)


def _like(base: Tensor, grad: Tensor) -> Tensor:
    """A gradient whose elements are in the order of those of a parameter."""
    if grad.stride() == base.stride() and not grad.is_neg():
        return grad
    return torch.empty_like(base).copy_(grad)


def in_copies(graph: fx.Graph) -> fx.Graph | None:
    """A copy of a graph whose updates are computed in copies of their bases; None if it has none."""
    if not any(isinstance(node.target, Update) for node in graph.nodes):
        return None
    written, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if isinstance(node.target, Update):
            env[node] = _in_copies(written, node, env)
        else:
            env[node] = written.node_copy(node, env.__getitem__)
    return written


def _in_copies(graph: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    bases: Any
    bases, *others = node.args
    copies = [graph.call_function(aten.clone.default, (env[base],)) for base in bases]
    for base, copy in zip(bases, copies, strict=True):
        inherit(copy, node)
        for tag in (VAL, LAYOUT, SHAPE):
            if tag.on(base):
                tag.set(copy, tag.of(base))
    args = fx.map_arg(tuple(others), env.__getitem__)
    args = (copies, *args)
    call = graph.create_node("call_function", UpdateInPlace(node.target), args, name=node.name)
    inherit(call, node, "call")
    return call


def written_operands(node: fx.Node) -> Sequence[fx.Node]:
    """The operands in whose memory the results of an update in place are; none of other nodes."""
    bases: Any = node.args[0] if isinstance(node.target, UpdateInPlace) else ()
    return bases
