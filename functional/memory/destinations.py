"""Destination-passing style: a tape whose operations write into memory that other steps allocate.

An operation that allocates its result becomes an allocation and calls that write to it: those of its
out-variant, or of what its result is by definition (a copy, a fill, a copy that is written to). Values
are the same bit for bit. An operation that has neither keeps its own allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.effects.in_place import in_place_variant, is_pointwise
from torchard.functional.memory.out_variants import out_variant
from torchard.functional.memory.tape import Recorder, Step, Tape
from torchard.functional.programs.labels import Label
from torchard.functional.torch_internals.operators import aten, c10d, prims

__all__ = ["ALLOCATIONS", "WRITERS", "Destination", "allocates", "with_destinations", "writer_of"]

# Operands of these may be computed directly in the result's memory (even the caller's), not copied.
_MERGED: frozenset[Any] = frozenset({aten.cat.default, c10d.all_reduce.default})

# Operators that allocate and write nothing.
ALLOCATIONS: frozenset[Any] = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)


@dataclass(frozen=True)
class Destination:
    """Where the result of a step is written, and by which calls.

    Attributes:
        result: the tensor that is written to.
    """

    result: torch.Tensor
    recorder: Recorder
    label: Label

    def view(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the call of a function that returns a view."""
        return self.recorder.call(function, self.label, *args, **kwargs)

    def write(self, function: Any, *args: Any, **kwargs: Any) -> None:
        """Add a call that writes to the result, or to a view of it."""
        self.recorder.write(function, self.label, *args, **kwargs)

    def copy(self, source: torch.Tensor, into: torch.Tensor | None = None) -> None:
        """Write the entries of a tensor, by default to the whole result."""
        self.write(aten.copy_.default, self.result if into is None else into, source)

    def fill(self, value: Any) -> None:
        """Write one value to all entries."""
        self.write(aten.fill_.Scalar, self.result, value)


Writer = Callable[..., None]
"""Adds the calls that write a result; takes the Destination and the arguments of the operator."""

WRITERS: dict[Any, Writer] = {}


def _writes(*operators: Any) -> Callable[[Writer], Writer]:
    def register(writer: Writer) -> Writer:
        WRITERS.update(dict.fromkeys(operators, writer))
        return writer

    return register


@_writes(
    aten.clone.default,
    aten.contiguous.default,
    aten.detach_copy.default,
    aten.lift_fresh_copy.default,
    prims.convert_element_type.default,
)
def _copy(to: Destination, x: torch.Tensor, *_: Any, **__: Any) -> None:
    to.copy(x)


@_writes(aten._to_copy.default)
def _to_copy(to: Destination, x: torch.Tensor, *, non_blocking: bool = False, **_: Any) -> None:
    to.write(aten.copy_.default, to.result, x, non_blocking)


@_writes(aten.reshape.default, aten._reshape_copy.default, aten.view_copy.default)
def _reshape(to: Destination, x: torch.Tensor, shape: Sequence[int]) -> None:
    to.copy(x, into=to.view(aten.view.default, to.result, list(x.shape)))


@_writes(aten.full.default, aten.full_like.default, aten.new_full.default)
def _full(to: Destination, like: Any, *args: Any, **_: Any) -> None:
    to.fill(args[-1])


@_writes(aten.scalar_tensor.default)
def _scalar(to: Destination, value: Any, **_: Any) -> None:
    to.fill(value)


@_writes(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
def _zeros(to: Destination, *_: Any, **__: Any) -> None:
    to.fill(0)


@_writes(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _ones(to: Destination, *_: Any, **__: Any) -> None:
    to.fill(1)


@_writes(aten.slice_backward.default)
def _slice_backward(to: Destination, grad: torch.Tensor, _: Any, *at: Any) -> None:
    to.fill(0)
    to.copy(grad, into=to.view(aten.slice.Tensor, to.result, *at))


@_writes(aten.select_backward.default)
def _select_backward(to: Destination, grad: torch.Tensor, _: Any, *at: Any) -> None:
    to.fill(0)
    to.copy(grad, into=to.view(aten.select.int, to.result, *at))


@_writes(aten.constant_pad_nd.default)
def _pad(to: Destination, x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> None:
    to.fill(value)
    inner, source = to.result, x
    for i in range(len(pad) // 2):
        dim, (before, after) = x.ndim - 1 - i, pad[2 * i : 2 * i + 2]
        inner = to.view(
            aten.slice.Tensor, inner, dim, max(before, 0), inner.shape[dim] - max(after, 0)
        )
        source = to.view(
            aten.slice.Tensor, source, dim, max(-before, 0), source.shape[dim] - max(-after, 0)
        )
    to.copy(source, into=inner)


@_writes(aten.embedding.default)
def _embedding(to: Destination, weight: torch.Tensor, ids: torch.Tensor, *_: Any) -> None:
    if not ids.is_contiguous():
        to.write(aten.index.Tensor_out, weight, [ids], out=to.result)
        return
    flat = to.view(aten.view.default, ids, [-1])
    rows = to.view(aten.view.default, to.result, [ids.numel(), *weight.shape[1:]])
    to.write(aten.index_select.out, weight, 0, flat, out=rows)


@_writes(aten.upsample_nearest2d.vec)
def _upsampled(to: Destination, x: torch.Tensor, _: Any, scales: Any) -> None:
    size = list(to.result.shape[2:])
    to.write(aten.upsample_nearest2d.out, x, size, *(scales or (None, None)), out=to.result)


@_writes(aten.relu.default)
def _relu(to: Destination, x: torch.Tensor) -> None:
    to.write(aten.clamp_min.out, x, 0, out=to.result)  # which is how torch defines it


@_writes(c10d.all_reduce.default)
def _all_reduce(to: Destination, x: torch.Tensor, *how: Any) -> None:
    to.copy(x)
    to.write(c10d.all_reduce_.default, to.result, *how)


@_writes(c10d.broadcast.default)
def _broadcast(to: Destination, x: torch.Tensor, *how: Any) -> None:
    to.copy(x)
    to.write(c10d.broadcast_.default, to.result, *how)


@_writes(c10d.all_gather_into_tensor.default)
def _all_gather(to: Destination, x: torch.Tensor, *how: Any) -> None:
    to.write(c10d.all_gather_into_tensor_out.default, x, *how, out=to.result)


@_writes(c10d.reduce_scatter_tensor.default)
def _reduce_scatter(to: Destination, x: torch.Tensor, *how: Any) -> None:
    to.write(c10d.reduce_scatter_tensor_out.default, x, *how, out=to.result)


def writer_of(step: Step) -> Writer | None:
    """The function that writes a step's result; None if the operation allocates the result itself."""
    op = step.function
    if not isinstance(op, internals.OpOverload):
        return None
    if op in WRITERS:
        return WRITERS[op]
    if out_variant(op) is not None and _may_write(step):
        return _by_out_variant(op)
    twin = in_place_variant(op)
    return _by_copy(twin) if twin is not None and _like_first(step) else None


def _may_write(step: Step) -> bool:
    """Whether an out-variant writes results of these strides.

    Those of kernels that are not element-wise may assume contiguous results, or make them so (torch 2.13:
    `native_batch_norm`, `_log_softmax_backward_data`, `reflection_pad3d`).
    """
    return is_pointwise(step.function) or all(x.is_contiguous() for x in step.tensors)


def _by_out_variant(op: Any) -> Writer:
    overload, names = out_variant(op) or (None, ())

    def write(to: Destination, *args: Any, **kwargs: Any) -> None:
        to.write(overload, *args, **kwargs, **{names[0]: to.result})

    return write


def _by_copy(twin: Any) -> Writer:
    def write(to: Destination, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        to.copy(x)
        to.write(twin, to.result, *args, **kwargs)

    return write


def _like_first(step: Step) -> bool:
    """Whether the result has the shape and dtype of the first operand."""
    first, (result, *more) = (step.args or (None,))[0], step.results
    if more or result is None or not isinstance(first, torch.Tensor):
        return False
    return first.shape == result.shape and first.dtype == result.dtype


def allocates(step: Step) -> bool:
    """Whether all results of a step are in memory of their own, and dense."""
    before = set(map(internals.storage_id, step.operands))
    return bool(step.tensors) and all(
        internals.storage_id(result) not in before and _is_dense(result) for result in step.tensors
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.storage_offset() == 0 and elements == tensor.numel()


def with_destinations(tape: Tape, donated: Sequence[torch.Tensor], fakes: Any) -> Tape:
    """The tape in destination-passing style.

    An operation whose only result is the caller's stays as it is, unless the result may take the memory
    of an argument.

    Args:
        donated: the inputs whose memory results may take.
        fakes: the mode of the tape's tensors.
    """
    layouts = {_layout(tensor) for tensor in donated}
    outputs = [tensor for tensor in tape.outputs if isinstance(tensor, torch.Tensor)]
    escaping = {internals.storage_id(x) for x in outputs if _layout(x) not in layouts}
    steps: list[Step] = []
    recorder = Recorder(fakes, steps)
    for step in tape.steps:
        inside = step.function in _MERGED or _is_inside(step, escaping)
        own = step.function in ALLOCATIONS or not allocates(step) or not inside
        if own or not _written(step, recorder):
            steps.append(step)
    return Tape(tape.inputs, steps, tape.outputs)


def _written(step: Step, recorder: Recorder) -> bool:
    """Record a step as allocations and what writes to them; false if the operation cannot do so."""
    writer = writer_of(step)
    if writer is None or len(step.tensors) < len(step.results):
        return False
    if step.several:
        overload, names = out_variant(step.function) or (None, ())
        if len(names) != len(step.results):
            return False
        results = dict(zip(names, step.results, strict=True))
        _allocate(recorder, step)
        recorder.write(overload, step.label, *step.args, **step.kwargs, **results)
    else:
        _allocate(recorder, step)
        writer(Destination(step.tensors[0], recorder, step.label), *step.args, **step.kwargs)
    return True


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _is_inside(step: Step, escaping: set[int]) -> bool:
    return any(internals.storage_id(result) not in escaping for result in step.tensors)


def _allocate(recorder: Recorder, step: Step) -> None:
    for result in step.tensors:
        args = list(result.shape), list(result.stride())
        kwargs = {"dtype": result.dtype, "device": result.device}
        recorder.steps.append(
            Step(aten.empty_strided.default, args, kwargs, (result,), False, step.label)
        )
