"""The autograd Function through which a conditional is recorded, differentiated and vmapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact, is_inexact_dtype
from torchard.functional.derivatives import autodiff
from torchard.functional.loops.branch_call import BranchCall, same_inputs
from torchard.functional.loops.call import as_body
from torchard.functional.loops.differentiated import called, kind_of, or_zeros
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.functional.tracing.purify import replay
from torchard.functional.tracing.trace_state import active, current_frames, in_frames

__all__ = ["run", "selected"]

Tensors = Sequence[torch.Tensor]
Derived = tuple[BranchCall, tuple[torch.Tensor, ...]]


def run(call: BranchCall, index: torch.Tensor, operands: Tensors) -> tuple[torch.Tensor, ...]:
    """Run a conditional, or record it in the trace in progress, under any transforms of torch.func."""
    apply: Any = _Branch.apply
    results: tuple[torch.Tensor, ...] = apply(call, index, *internals.resolved(operands))
    return results


def selected(index: torch.Tensor, values: Tensors) -> torch.Tensor:
    """The value of the index, or, if there is one for each example, those of theirs, along dim 0."""
    chosen = values[0]
    for k, value in enumerate(values[1:], 1):
        taken = (index == k).reshape((*index.shape, *[1] * (value.ndim - index.ndim)))
        chosen = torch.where(taken, value, chosen)
    return chosen


class _Branch(torch.autograd.Function):
    """A conditional, whose derivatives are conditionals of the branches' derivatives."""

    @staticmethod
    def forward(call: BranchCall, index: torch.Tensor, *operands: torch.Tensor) -> Any:
        state = active()
        if state is None:
            return tuple(replay(call.branches[int(index)].graph, list(operands)))
        return state.recorded(call, [index, *operands], call.result_specs())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, index, *operands = inputs
        ctx.call, ctx.frames = call, current_frames()
        ctx.shapes = [kind_of(x) for x in output]
        ctx.save_for_backward(index, *operands)
        ctx.save_for_forward(index, *operands)
        ctx.set_materialize_grads(False)
        floating = set(_floating_results(call))
        ctx.mark_non_differentiable(*(x for i, x in enumerate(output) if i not in floating))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: BranchCall = ctx.call
        wanted = tuple(
            need and is_inexact_dtype(x.dtype)
            for need, x in zip(ctx.needs_input_grad[2:], ctx.saved_tensors[1:], strict=True)
        )
        cotangents = [or_zeros(grads[i], ctx.shapes[i]) for i in _floating_results(call)]
        pulled, constants = call.once(("pullback", wanted), lambda: _pullback(call, wanted))
        with in_frames(ctx.frames):
            gradients = iter(called(pulled, [*ctx.saved_tensors, *cotangents], constants))
        return None, None, *(next(gradients) if w else None for w in wanted)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        call: BranchCall = ctx.call
        results: list[Any] = [None] * len(ctx.shapes)
        primals, given = ctx.saved_tensors[1:], tangents[2:]
        moved = tuple(
            t is not None and is_inexact_dtype(x.dtype) for x, t in zip(primals, given, strict=True)
        )
        pushed, constants = call.once(("pushforward", moved), lambda: _pushforward(call, moved))
        with_tangents = [t for t, m in zip(given, moved, strict=True) if m]
        moving = called(pushed, [*ctx.saved_tensors, *with_tangents], constants)
        for i, tangent in zip(_floating_results(call), moving, strict=True):
            results[i] = tangent
        return tuple(results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: BranchCall, index: Any, *operands: Any) -> Any:
        mapped = tuple(dim is not None for dim in in_dims[2:])
        moved = [
            x if dim is None else x.movedim(dim, 0) for x, dim in zip(operands, in_dims[2:], strict=True)
        ]
        size = info.batch_size
        batched, constants = call.once(("batched", mapped, size), lambda: _batched(call, mapped, size))
        dims = (0,) * len(call.branches[0].results)
        if in_dims[1] is None:
            return called(batched, [index, *moved], constants), dims
        # Each example has its own: all branches are computed.
        state = active()
        if state is not None:
            state.constants.update(map(id, constants))
        results = [
            replay(branch.graph, [*moved, *constants]) for branch in batched.branches
        ]
        index = index.movedim(in_dims[1], 0)
        return tuple(selected(index, values) for values in zip(*results, strict=True)), dims


# -- derivatives ------------------------------------------------------------------------------------


def _derived(call: BranchCall, derive: Callable[[Program], Program]) -> Derived:
    """The conditional of programs that are derived from the branches; the constants of all of them."""
    programs = [derive(branch) for branch in call.branches]
    constants = tuple(constant for program in programs for constant in program.constants)
    own = [len(program.constants) for program in programs]
    branches = same_inputs([as_body(program) for program in programs], own)
    return replace(call, branches=branches, derived={}), constants


def _pullback(call: BranchCall, wanted: Sequence[bool]) -> Derived:
    tags = (None,) * len(call.branches[0].outputs)
    return _derived(call, lambda branch: autodiff.pullback(branch, wanted, tags))


def _pushforward(call: BranchCall, moved: Sequence[bool]) -> Derived:
    tags = (None,) * len(call.branches[0].outputs)
    return _derived(call, lambda branch: autodiff.pushforward(branch, moved, tags))


def _batched(call: BranchCall, mapped: Sequence[bool], size: int) -> Derived:
    tags = (None,) * len(call.branches[0].outputs)
    return _derived(call, lambda branch: autodiff.batched(branch, mapped, size, tags))


def _floating_results(call: BranchCall) -> list[int]:
    """The positions of the results that have a derivative."""
    return [i for i, node in enumerate(call.branches[0].results) if is_inexact(VAL.of(node))]
