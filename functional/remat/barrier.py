"""Barriers, which keep a compiler from undoing recomputation.

To a compiler a recomputation is a common subexpression of the original value, so it merges the two; or it
moves all recomputations to the start of the backward. Either way the memory is not saved. An operand of
each recomputation therefore passes through an opaque operation, which depends on the value that the
backward computed last.

The operation copies its operand, since the output of a custom operator must not alias an input. It is put
on the smallest operand, mostly a bias or the weight of a norm. What a collective has yet to write is not
copied: its wait has no barrier of its own, and the operation that issues it has one.

Values that are compared with something that was kept may not be recomputed at all: a compiler rounds a
value otherwise in each piece of code that computes it. Where a policy keeps a maximum, and its operand is
recomputed in the backward, none of the recomputed elements need equal it.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx

from torchard.functional.compiling.exact_routes import read_from_two_nodes
from torchard.functional.programs.graphs import add_call
from torchard.functional.programs.program import Program
from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import PHASE, RECOMPUTE, SHAPE, VAL, WHY
from torchard.functional.programs.views import is_view
from torchard.functional.remat.segments import Why
from torchard.functional.torch_internals.operators import c10d

__all__ = ["insert_barriers", "keep_compared"]

LIBRARY = torch.library.Library("torchard", "FRAGMENT")
LIBRARY.define("barrier(Tensor x, Tensor after) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _barrier(x: Tensor, after: Tensor) -> Tensor:
    return x.clone()


def _fake(x: Tensor, after: Tensor) -> Tensor:
    return torch.empty_like(x)


LIBRARY.impl("barrier", _barrier, "CompositeExplicitAutograd")
torch.library.register_fake("torchard::barrier", _fake, lib=LIBRARY)


# The operand of a wait is not there before; a tuple is no operand of a barrier.
_WITHOUT = (operator.getitem, c10d.wait_tensor.default)


def insert_barriers(graph: fx.Graph) -> None:
    """Make every recomputation wait for the value that the backward computes right before it."""
    last: fx.Node | None = None
    waits: dict[fx.Node, fx.Node] = {}  # from a recomputation to the value it waits for
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
        elif last is not None and operands and not is_view(node) and node.target not in _WITHOUT:
            smallest = min(operands, key=_elements)
            if (smallest, last) not in passed:
                with graph.inserting_before(node):
                    passed[smallest, last] = add_call(
                        smallest, torch.ops.torchard.barrier.default, smallest, last, same="value"
                    )
            node.replace_input_with(smallest, passed[smallest, last])
            waits[node] = last


def _is_tensor(node: fx.Node) -> bool:
    return _elements(node) < math.inf


def _elements(node: fx.Node) -> float:
    """The size of a tensor, inf if unknown: a graph lowered for a mesh has only some local shapes."""
    value = VAL.get(node)
    if isinstance(value, Tensor):
        return value.numel()
    return math.prod(SHAPE.of(node)) if SHAPE.on(node) else math.inf


def keep_compared(program: Program) -> Program:
    """Have backwards read values that are compared as the forward computed them, in place."""
    if not any(RECOMPUTE.get(node) for node in program.calls):
        return program
    for value, *others in read_from_two_nodes(program.graph):
        for other in others:
            other.replace_all_uses_with(value)
        for item in value.users:
            if item.target is operator.getitem:
                forget(item, RECOMPUTE)
        WHY.set(value, Why("compared with a value that is kept"))
    program.graph.eliminate_dead_code()
    return program
