"""Passes that keep faults of Inductor's from changing what a program computes.

They run on the graph that Inductor lowers, after its decompositions and patterns and before it makes
operations write in place. Each works around one fault, observed on torch 2.13; `faulty_lowerings.py` has
the single operations that it computes wrongly.

`copy_before_writes`: a functional write (`index_put`, `select_scatter`, ...) into a value that nothing
else reads becomes one in place, also where several elements of the value are one place in memory
(`expand`, `unfold`), so that all of them change.

`compute_once`: a pointwise value is computed again in each kernel that reads it, by vector code in one
and by scalar code in another, which round differently. A comparison of the value with its own maximum may
then be false everywhere, and a gradient zero or NaN.

That the scheduler may order a kernel before a write in place of what it reads, or writes in place into a
part of a concatenation, is mended in `torch_internals/written_buffers.py`: no pass over a graph knows
of it.

In half precision kernels compute in float32 and round only what they store. No pass can mend that: where
`has_half_precision`, Inductor is told to round whatever eager rounds. But it rounds no numbers:
`round_numbers` does. Nor does it round constants that are converted, where it may not fold them
(`torch_internals/compilers.py` says why it may not): `fold_conversions` folds those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from torchard.functional.core import tree
from torchard.functional.execution.exact_routes import read_twice
from torchard.functional.execution.faulty_lowerings import call_torch
from torchard.functional.programs.tags import INDUCTOR_REALIZE_TO_STRIDES, VAL
from torchard.functional.torch_internals.operators import aten, prims

__all__ = ["REPAIRS", "compute_once", "copy_before_writes", "has_half_precision", "round_numbers"]

# What Inductor turns into writes in place: of these and of what it writes by way of them.
_WRITES = {
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
    aten.diagonal_scatter.default,
    aten.as_strided_scatter.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.index_add.default,
    aten.index_copy.default,
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.index_reduce.default,
    aten.masked_scatter.default,
    aten.put.default,
}

# For these eager torch rounds numbers, and tensors without dims, to the dtype of the other operand, on a
# CPU. For `mul` and `div` it does not.
_ROUNDED = {
    *(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar),
    *(aten.pow.Tensor_Scalar, aten.pow.Scalar, aten.pow.Tensor_Tensor),
    *(aten.remainder.Scalar, aten.remainder.Scalar_Tensor, aten.remainder.Tensor),
    *(aten.fmod.Scalar, aten.fmod.Tensor),
    *(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar),
    *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor),
}
# These make values of a number.
_FILLED = {
    *(aten.full.default, aten.full_like.default, aten.new_full.default, aten.fill.Scalar),
    aten.scalar_tensor.default,
}


def copy_before_writes(graph: fx.Graph) -> None:
    """Copy values of several elements in one place of memory before something is written into them."""
    for node in list(graph.nodes):
        if node.target not in _WRITES:
            continue
        written = node.args[0]
        if not isinstance(written, fx.Node) or not _may_overlap(written):
            continue
        with graph.inserting_before(node):
            whole = graph.call_function(
                aten.clone.default, (written,), {"memory_format": torch.contiguous_format}
            )
        VAL.set(whole, VAL.of(written).contiguous())
        node.replace_input_with(written, whole)


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


def round_numbers(graph: fx.Graph) -> None:
    """Round what eager torch rounds to half precision before it computes."""
    for node in list(graph.nodes):
        dtype = _rounds_to(node)
        if dtype in (torch.bfloat16, torch.float16):
            with graph.inserting_before(node):
                node.args = tuple(_rounded(x, dtype) for x in node.args)
                node.kwargs = {key: _rounded(x, dtype) for key, x in node.kwargs.items()}


def fold_conversions(graph: fx.Graph) -> None:
    """Make constants of conversions of constants."""
    constants: dict[fx.Node, torch.Tensor] = {}  # of one element, which all elements of the value are
    for node in list(graph.nodes):
        value = _constant(node, constants)
        if value is None:
            continue
        constants[node] = value
        if node.target in _CONVERSIONS and value.dtype.is_floating_point:
            like = VAL.of(node)
            options = {"dtype": like.dtype, "device": like.device}
            with graph.inserting_before(node):
                full = graph.call_function(
                    aten.full.default, (list(like.shape), value.item()), options
                )
            VAL.set(full, like)
            constants[full] = value
            node.replace_all_uses_with(full)


_CONVERSIONS = {prims.convert_element_type.default, aten._to_copy.default}
_SHAPED = {
    *(aten.expand.default, aten.view.default, aten.reshape.default, aten.permute.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default),
}


def _constant(node: fx.Node, constants: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The one element that a value has, if it is a constant: of no dims if the value has none."""
    value = VAL.get(node)
    if node.op != "call_function" or not isinstance(value, torch.Tensor):
        return None
    if not all(isinstance(size, int) for size in value.shape) or value.device.type != "cpu":
        return None
    one = [1] * bool(value.dim())
    if node.target is aten.full.default and isinstance(node.args[1], (int, float)):
        return torch.full(one, node.args[1], dtype=value.dtype)
    if not node.all_input_nodes or any(x not in constants for x in node.all_input_nodes):
        return None
    if node.target in _SHAPED:
        return constants[node.all_input_nodes[0]].reshape(one)
    op: Any = node.target
    pointwise = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    if not pointwise and op not in _CONVERSIONS:
        return None
    given: Any = fx.map_arg((node.args, node.kwargs), constants.__getitem__)
    args, kwargs = given
    found = op(*args, **kwargs)
    return found if isinstance(found, torch.Tensor) and found.dtype == value.dtype else None


def _rounds_to(node: fx.Node) -> torch.dtype | None:
    """The dtype to which an operation rounds numbers."""
    values: list[torch.Tensor] = []
    if node.target in _FILLED:
        values = [VAL.of(node)]
    elif node.target in _ROUNDED:
        values = [x for x in map(VAL.of, node.all_input_nodes) if x.dim()]
    dtypes = {x.dtype for x in values}
    return dtypes.pop() if len(dtypes) == 1 else None


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, float):
        return torch.tensor(value, dtype=dtype).item()
    if not isinstance(value, fx.Node) or VAL.of(value).dim() or not _is_wider(value, dtype):
        return value
    if value.target is aten.full.default:  # Inductor reads it as the number
        number, options = _rounded(value.args[1], dtype), {**value.kwargs, "dtype": dtype}
        rounded = value.graph.call_function(value.target, ([], number), options)
    else:
        rounded = value.graph.call_function(prims.convert_element_type.default, (value, dtype))
    VAL.set(rounded, VAL.of(value).to(dtype))
    return rounded


def _is_wider(node: fx.Node, dtype: torch.dtype) -> bool:
    have: torch.Tensor = VAL.of(node)
    return have.is_floating_point() and have.dtype != dtype


def has_half_precision(graph: fx.Graph, inputs: Iterable[torch.Tensor]) -> bool:
    """Whether some value of a graph, or an input, is a float of 16 or of 8 bits."""
    values = [VAL.get(node) for node in graph.nodes]
    tensors = [*inputs, *(x for x in tree.leaves(values) if isinstance(x, torch.Tensor))]
    return any(x.is_floating_point() and x.itemsize < 4 for x in tensors)


# Of what is traced, `call_torch` is called before: here it sees what Inductor decomposes operations to.
REPAIRS = (call_torch, fold_conversions, round_numbers, copy_before_writes, compute_once)
