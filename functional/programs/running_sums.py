"""Running sums: where generated code adds in place.

A program has no writes. But a sum whose first operand nothing else reads can be computed in that
operand's storage, and a product that is added can be computed into it. So a gradient that is accumulated
over microbatches has one buffer, as in Megatron-LM's gradient accumulation fusion.
"""

from __future__ import annotations

import torch
from torch import fx

from torchard.functional.programs.tags import LOOP, RUNNING, VAL
from torchard.functional.torch_internals import ProgramGraph
from torchard.functional.torch_internals.operators import aten

__all__ = ["added_product", "in_place", "sum_so_far"]

_SUMS = (aten.add.Tensor, aten.add_.Tensor, aten.addmm_.default)


def sum_so_far(node: fx.Node) -> fx.Node | None:
    """The operand of a sum whose storage the result takes; None if it takes none.

    It is a sum itself, so it aliases nothing that a caller holds.
    """
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    before, _ = node.all_input_nodes
    have, want = VAL.get(before), VAL.get(node)
    if LOOP.get(before) is not LOOP.get(node):  # each iteration reads the operand
        return None
    if before.target is not aten.add.Tensor or len(before.users) > 1 or not _are_alike(have, want):
        return None
    return before


def _are_alike(have: object, want: object) -> bool:
    if not (isinstance(have, torch.Tensor) and isinstance(want, torch.Tensor)):
        return False
    same = have.shape == want.shape and have.stride() == want.stride()
    return same and (have.dtype, have.device) == (want.dtype, want.device)


def added_product(node: fx.Node) -> fx.Node | None:
    """The product that a running sum adds, and that nothing else reads."""
    _, part = node.all_input_nodes
    if part.target is not aten.mm.default or len(part.users) > 1:
        return None
    return part if _are_alike(VAL.get(part), VAL.get(node)) else None


def in_place(graph: fx.Graph) -> fx.Graph | None:
    """A copy of a graph whose running sums are computed in place; None if it has none.

    Nodes of a rank's graph, which have no global values, have the tag ``running``.
    """
    found = {node: product for node in graph.nodes if (product := _product(node)) is not None}
    if not found:
        return None
    copies: dict[fx.Node, fx.Node] = {}
    written = ProgramGraph()
    out = written.graph_copy(graph, copies)
    for node in graph.nodes:
        if node.op == "output":
            written.output(out)
    for node, product in found.items():
        _write(copies[node], product)
    return written


def _product(node: fx.Node) -> bool | None:
    """Whether a running sum adds a product; None for other nodes."""
    if sum_so_far(node) is not None:
        return added_product(node) is not None
    return RUNNING.get(node)


def _write(node: fx.Node, product: bool) -> None:
    before, part = node.all_input_nodes
    if before.target not in _SUMS or len(before.users) > 1:
        return
    node.target = aten.add_.Tensor
    if product and part.target is aten.mm.default and len(part.users) == 1:
        node.target, node.args = aten.addmm_.default, (before, *part.args)
        node.graph.erase_node(part)
