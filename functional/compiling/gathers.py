"""Gathers in graphs that Inductor lowers, by the operator that is safe (`programs/calls.py` says why)."""

from __future__ import annotations

from torch import fx

from torchard.functional.programs.tags import VAL
from torchard.functional.torch_internals.operators import aten, c10d

__all__ = ["gather_into_new"]


def gather_into_new(graph: fx.Graph) -> None:
    """Gather tensors on a CPU into memory that the graph allocates."""
    for node in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
        whole = VAL.of(node)
        if whole.device.type != "cpu" or whole.is_complex():
            continue
        like = {"dtype": whole.dtype, "device": whole.device}
        with graph.inserting_before(node):
            out = graph.call_function(aten.empty.memory_format, (list(whole.shape),), like)
        VAL.set(out, whole)
        node.target, node.kwargs = c10d.all_gather_into_tensor_out.default, {"out": out}
