"""The autograd Function through which a loop is recorded, differentiated and vmapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact_dtype
from torchard.functional.loops.branch_call import BranchCall
from torchard.functional.loops.call import Gives, LoopCall
from torchard.functional.loops.derived import (
    batched,
    floating_carries,
    floating_outputs,
    pullback,
    pushforward,
    with_carries,
)
from torchard.functional.tracing.purify import replay, specs_of
from torchard.functional.tracing.trace_state import active, current_frames, in_frames

__all__ = ["called", "kind_of", "or_zeros", "run"]

Tensors = Sequence[torch.Tensor]


def run(loop: LoopCall, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a loop, or record it in the trace in progress, under any transforms of torch.func."""
    apply: Any = _Loop.apply
    results: tuple[torch.Tensor, ...] = apply(with_carries(loop), *internals.resolved(operands))
    return results[: len(loop.gives)]


class _Loop(torch.autograd.Function):
    """A loop that returns its carries too, last: its derivatives are computed from them."""

    @staticmethod
    def forward(loop: LoopCall, *operands: torch.Tensor) -> Any:
        state = active()
        if state is None:
            return _iterate(loop, operands)
        return state.recorded(loop, operands, loop.result_specs())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        loop, *operands = inputs
        count = len(loop.inputs("carry"))
        carries = output[len(output) - count :]
        ctx.loop, ctx.frames, ctx.shapes = loop, current_frames(), [kind_of(x) for x in output]
        ctx.save_for_backward(*operands, *carries)
        ctx.save_for_forward(*operands, *carries)
        ctx.set_materialize_grads(False)
        has_derivative = set(floating_outputs(loop))
        ctx.mark_non_differentiable(*(x for i, x in enumerate(output) if i not in has_derivative))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        loop: LoopCall = ctx.loop
        needed = ctx.needs_input_grad[1:]
        moved = [
            i for i in floating_outputs(loop) if grads[i] is not None or loop.gives[i] == "carry"
        ]
        cotangents = [or_zeros(grads[i], ctx.shapes[i]) for i in moved]
        pulled, constants = pullback(loop, tuple(needed), tuple(moved))
        with in_frames(ctx.frames):
            gradients = iter(called(pulled, [*_primals(ctx), *cotangents], constants))
        carries = set(floating_carries(loop))
        floating = _floats(loop)
        return None, *(
            next(gradients) if is_floating and (i in carries or wanted) else None
            for i, (is_floating, wanted) in enumerate(zip(floating, needed, strict=True))
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        loop: LoopCall = ctx.loop
        results: list[Any] = [None] * len(loop.gives)
        given = tangents[1:]
        pushed, constants = pushforward(loop, tuple(t is not None for t in given))
        carries, floating = set(floating_carries(loop)), _floats(loop)
        moved = [
            torch.zeros_like(primal) if tangent is None else tangent
            for i, (primal, tangent) in enumerate(zip(ctx.saved_tensors, given, strict=False))
            if floating[i] and (i in carries or tangent is not None)
        ]
        moved_results = called(pushed, [*_primals(ctx), *moved], constants)
        for i, tangent in zip(floating_outputs(loop), moved_results, strict=True):
            results[i] = tangent
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, loop: LoopCall, *operands: torch.Tensor) -> Any:
        places = [int(takes == "row") for takes in loop.takes]
        mapped = tuple(
            dim is not None or takes == "carry"
            for dim, takes in zip(in_dims[1:], loop.takes, strict=True)
        )
        moved = [
            x
            if not m
            else x.expand(info.batch_size, *x.shape)
            if dim is None
            else x.movedim(dim, place)
            for x, dim, m, place in zip(operands, in_dims[1:], mapped, places, strict=True)
        ]
        loop, constants = batched(loop, mapped, info.batch_size)
        return called(loop, moved, constants), tuple(int(gives == "rows") for gives in loop.gives)


def called(
    call: LoopCall | BranchCall, operands: Tensors, constants: Tensors
) -> tuple[torch.Tensor, ...]:
    """A call of a derived loop or conditional, whose constants are its last operands."""
    state = active()
    if state is not None:
        state.constants.update(map(id, constants))
    return call(*operands, *constants)


def _primals(ctx: Any) -> list[torch.Tensor]:
    """The operands, with the carries of all iterations in place of those of the first."""
    loop: LoopCall = ctx.loop
    saved = list(ctx.saved_tensors)
    operands, carries = saved[: len(loop.takes)], saved[len(loop.takes) :]
    for i, rows in zip(loop.inputs("carry"), carries, strict=True):
        operands[i] = rows
    return operands


def _iterate(loop: LoopCall, operands: Tensors) -> tuple[torch.Tensor, ...]:
    inputs = list(operands)
    results: list[list[torch.Tensor]] = [[] for _ in loop.gives]
    for i in loop.row_orders():
        for k in loop.inputs("row"):
            inputs[k] = operands[k][i]
        outputs = replay(loop.body.graph, inputs)
        for values, output in zip(results, outputs, strict=True):
            values.append(output)
        for k, out in zip(loop.inputs("carry"), loop.outputs("carry"), strict=True):
            inputs[k] = outputs[out]
    return tuple(
        _collected(loop, gives, values) for gives, values in zip(loop.gives, results, strict=True)
    )


def _collected(loop: LoopCall, gives: Gives, values: list[torch.Tensor]) -> torch.Tensor:
    """A result of the loop, from the values of the iterations in the order in which they ran."""
    if gives == "carry":
        return values[-1]
    if gives == "total":
        return sum(values[1:], start=values[0])
    return torch.stack(values[::-1] if loop.reverse else values)


def _floats(loop: LoopCall) -> list[bool]:
    """For each operand, whether it has a derivative."""
    return [
        is_inexact_dtype(spec.dtype) for spec in specs_of(loop.body.graph)
    ]


def kind_of(x: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """The shape, dtype and device of a tensor."""
    return x.shape, x.dtype, x.device


def or_zeros(
    cotangent: torch.Tensor | None, kind: tuple[torch.Size, torch.dtype, torch.device]
) -> torch.Tensor:
    """A cotangent; zeros of this shape, dtype and device if there is none."""
    if cotangent is not None:
        return cotangent
    shape, dtype, device = kind
    return torch.zeros(shape, dtype=dtype, device=device)
