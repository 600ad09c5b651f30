"""Passes that keep faults of Inductor's from changing what a program computes.

They run on the graph that Inductor lowers, after its decompositions and patterns and before it makes
operations write in place. Each works around one fault, observed on torch 2.13; `faulty_lowerings.py` has
the single operations that it computes wrongly.

`copy_before_writes`: a functional write (`index_put`, `select_scatter`, ...) into a value that nothing
else reads becomes one in place, also where several elements of the value are one place in memory
(`expand`, `unfold`), so that all of them change.

`conjugate_at_once`: `conj` returns its operand with a mark. Where Inductor copies such a value, to lay it
out otherwise for torch's own kernel, it copies what is in memory.

`compute_once`: a pointwise value is computed again in each kernel that reads it, by vector code in one
and by scalar code in another, which round differently. A comparison of the value with its own maximum may
then be false everywhere, and a gradient zero or NaN.

What no pass over a graph knows of (the order of kernels and writes, what lies where in memory, and how
torch's own kernels are called) is mended in `torch_internals/changed_inductor.py`.

In half precision kernels compute in float32 and round only what they store. No pass can mend that: where
`has_half_precision`, Inductor is told to round whatever eager rounds. It still rounds no numbers and no
constants: `rounded_constants.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals
from torchard.functional.compiling.exact_routes import read_twice
from torchard.functional.compiling.faulty_lowerings import call_torch
from torchard.functional.compiling.gathers import gather_into_new
from torchard.functional.compiling.rounded_constants import fold_conversions, round_numbers
from torchard.functional.core import tree
from torchard.functional.effects.in_place import SCATTERS, WRITTEN_VIEWS
from torchard.functional.programs.tags import INDUCTOR_REALIZE_TO_STRIDES, VAL
from torchard.functional.torch_internals.operators import aten

__all__ = [
    *("REPAIRS", "WRITES", "compute_once", "conjugate_at_once"),
    *("copy_before_writes", "has_half_precision"),
]

# Operations that Inductor turns into writes in place, or decomposes to such operations.
WRITES = {*SCATTERS, *WRITTEN_VIEWS, aten.as_strided_scatter.default} - {
    aten.copy.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
}


def copy_before_writes(graph: fx.Graph) -> None:
    """Copy values of several elements in one place of memory before something is written into them.

    Copied are also operands that are views of what is written into: Inductor (torch 2.13) reads them
    while it writes.
    """
    for node in list(graph.nodes):
        if node.target not in WRITES:
            continue
        written = node.args[0]
        for operand in node.all_input_nodes:
            if operand is not written and _share_memory(operand, written):
                _copy_operand(node, operand)
        if not isinstance(written, fx.Node) or not _may_overlap(written):
            continue
        with graph.inserting_before(node):
            whole = graph.call_function(
                aten.clone.default, (written,), {"memory_format": torch.contiguous_format}
            )
        VAL.set(whole, VAL.of(written).contiguous())
        node.replace_input_with(written, whole)


def _share_memory(one: fx.Node, other: object) -> bool:
    values = [VAL.get(x) for x in (one, other) if isinstance(x, fx.Node)]
    numbers = {internals.storage_id(x) for x in values if isinstance(x, torch.Tensor)}
    return len(values) == 2 and len(numbers) == 1


def _copy_operand(node: fx.Node, operand: fx.Node) -> None:
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(aten.clone.default, (operand,))
    VAL.set(copy, VAL.of(operand).clone())
    node.replace_input_with(operand, copy)


def _may_overlap(node: fx.Node) -> bool:
    """Whether two elements may be one place: as the value is, or as Inductor may lay it out."""
    value = VAL.get(node)
    if not isinstance(value, torch.Tensor) or _overlaps(value):
        return True
    while getattr(node.target, "is_view", False) or node.target is aten._unsafe_view.default:
        base: Any = node.args[0]
        if VAL.of(base).numel() < VAL.of(node).numel():
            return True
        node = base
    return False


def _overlaps(value: torch.Tensor) -> bool:
    """Whether strides, from the smallest on, do not step over what smaller ones reach."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def conjugate_at_once(graph: fx.Graph) -> None:
    """Store conjugated values."""
    for node in graph.find_nodes(op="call_function", target=aten._conj.default):
        node.target = aten._conj_physical.default
        VAL.set(node, VAL.of(node).resolve_conj())


def compute_once(graph: fx.Graph) -> None:
    """Have values that are compared exactly with what was made of them stored, and read from memory.

    A value that is computed by several nodes is taken from the first, also where a checkpoint would
    recompute it.
    """
    for value, *others in read_twice(graph):
        if not INDUCTOR_REALIZE_TO_STRIDES.get(value):  # torch may have set it
            INDUCTOR_REALIZE_TO_STRIDES.set(value, True)
        for other in others:
            other.replace_all_uses_with(value)


def has_half_precision(graph: fx.Graph, inputs: Iterable[torch.Tensor]) -> bool:
    """Whether some value of a graph, or an input, is a float of 16 or of 8 bits."""
    values = [VAL.get(node) for node in graph.nodes]
    tensors = [*inputs, *(x for x in tree.leaves(values) if isinstance(x, torch.Tensor))]
    return any(x.is_floating_point() and x.itemsize < 4 for x in tensors)


# `call_torch` has run on the traced operations before; here it runs on Inductor's decompositions.
REPAIRS = (
    *(call_torch, round_numbers, fold_conversions),
    *(copy_before_writes, conjugate_at_once, compute_once, gather_into_new),
)
