"""A barrier keeps a compiler from making early what is to be made again late.

A compiler sees that a version of a value is the same computation as the value itself, and shares them; or
that nothing stands in the way of making all versions when the backward begins. Either way the operations
are counted right and the memory is lost. What a version starts from therefore goes through an opaque
operation that waits for what the backward has made last.

The operation copies: an output that lies in its operand's storage is not allowed of one that compilers
take as it is. It is put on the smallest operand, which mostly is a bias or the weight of a norm.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx

from torchard.functional.programs.tagging import inherit
from torchard.functional.programs.tags import PHASE, RECOMPUTE, SHAPE, VAL
from torchard.functional.programs.views import is_view

__all__ = ["insert_barriers"]

LIBRARY = torch.library.Library("torchard", "FRAGMENT")
LIBRARY.define("barrier(Tensor x, Tensor after) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _barrier(x: Tensor, after: Tensor) -> Tensor:
    return x.clone()


def _fake(x: Tensor, after: Tensor) -> Tensor:
    return torch.empty_like(x)


LIBRARY.impl("barrier", _barrier, "CompositeExplicitAutograd")
torch.library.register_fake("torchard::barrier", _fake, lib=LIBRARY)


def insert_barriers(graph: fx.Graph) -> None:
    """Let what is made again (``recompute``) wait for the backward's last value ahead of it."""
    last: fx.Node | None = None
    waits: dict[fx.Node, fx.Node] = {}  # of a version, what it waited for
    passed: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for node in list(graph.nodes):
        operands = node.all_input_nodes
        if node.op != "call_function":
            continue
        if not RECOMPUTE.get(node):
            if PHASE.get(node) == "backward" and not is_view(node) and _is_tensor(node):
                last = node
        elif last is not None and any(waits.get(operand) is last for operand in operands):
            waits[node] = last
        elif last is not None and operands and not is_view(node) and node.target is not operator.getitem:
            smallest = min(operands, key=_elements)
            if (smallest, last) not in passed:
                with graph.inserting_before(node):
                    made = graph.call_function(
                        torch.ops.torchard.barrier.default, (smallest, last)
                    )
                inherit(made, smallest, "value")
                passed[smallest, last] = made
            node.replace_input_with(smallest, passed[smallest, last])
            waits[node] = last


def _is_tensor(node: fx.Node) -> bool:
    return _elements(node) < math.inf


def _elements(node: fx.Node) -> float:
    """Of a tensor; a graph that was lowered for a mesh knows local shapes only, and not of all."""
    value = VAL.get(node)
    if isinstance(value, Tensor):
        return value.numel()
    return math.prod(SHAPE.of(node)) if SHAPE.on(node) else math.inf
