"""Updates in place: in the memory of copies, which are not made where the originals may be written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from torchard.functional import torch_internals as internals
from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import LAYOUT, VAL
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
        count = len(grads)
        with torch.no_grad():
            if _are_simple((*bases, *grads)):
                trees = [bases[k : k + count] for k in range(0, len(bases), count)]
                self.update.write(trees, grads, *shared)
            else:
                for i, grad in enumerate(grads):
                    self._one(bases[i::count], grad, *shared)
        return tuple(bases)

    def _one(self, row: Row, grad: Tensor, *shared: Any) -> None:
        """Update one parameter: by the kernel if its tensors have their elements in one order."""
        strides = row[0].stride()
        if is_dense(row[0]) and all(x.stride() == strides for x in row) and _may_be_read((*row, grad)):
            if grad.stride() != strides:
                grad = torch.empty_like(row[0]).copy_(grad)
            if grad.numel():
                self.update.write([[x] for x in row], [grad], *shared)
            return
        for base, value in zip(row, self.update.one(*row, grad, *shared), strict=True):
            base.copy_(value)


def _are_simple(tensors: Row) -> bool:
    """Whether all are contiguous: kernels read no strides."""
    return (
        _may_be_read(tensors)
        and all(map(Tensor.is_contiguous, tensors))
        and all(map(Tensor.numel, tensors))
    )


def _may_be_read(tensors: Row) -> bool:
    """Whether tensors are in memory, as it is, and no tracer has to see what is done with them."""
    plain = all(kind in _PLAIN for kind in set(map(type, tensors)))
    return plain and not any(map(Tensor.is_neg, tensors)) and not internals.records_operations()


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
    update: Any = node.target
    bases: Any
    bases, *others = node.args
    copies = [graph.call_function(aten.clone.default, (env[base],)) for base in bases]
    for base, copy in zip(bases, copies, strict=True):
        inherit(copy, node)
        for tag in (VAL, LAYOUT):
            if tag.on(base):
                tag.set(copy, tag.of(base))
    args = fx.map_arg(tuple(others), env.__getitem__)
    args = (copies, *args)
    call = graph.create_node("call_function", UpdateInPlace(update), args, name=node.name)
    inherit(call, node, "call")
    return call


def written_operands(node: fx.Node) -> Sequence[fx.Node]:
    """The operands in whose memory the results of an update in place are; none of other nodes."""
    if not isinstance(node.target, UpdateInPlace):
        return ()
    bases: Any = node.args[0]
    return list(bases)
