"""Calls of opaque functions without effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core import tree
from torchard.functional.core.errors import CheckError, DerivativeError
from torchard.functional.core.tensor_spec import TensorSpec, contiguous, is_inexact_dtype
from torchard.functional.programs.markers import PureCall
from torchard.functional.tracing.trace_state import active

__all__ = ["as_results", "called", "of_each", "without_derivative"]


def called(call: PureCall, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Call it, or record the call in the trace in progress."""
    apply: Any = _Called.apply
    made: tuple[torch.Tensor, ...] = apply(call, *values)
    return made


class _Called(torch.autograd.Function):
    """The call, without a derivative."""

    @staticmethod
    def forward(call: PureCall, *values: torch.Tensor) -> Any:
        state = active()
        if state is not None:
            return state.recorded(call, values, call.results)
        if any(isinstance(x, internals.FakeTensor) for x in values):  # a tape is recorded
            return tuple(spec.empty() for spec in call.results)
        return as_results(
            "pure_callback", call.function(*(x.detach() for x in values)), call.results
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[0]
        ctx.mark_non_differentiable(*(x for x in output if not is_inexact_dtype(x.dtype)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise without_derivative("pure_callback", ctx.call.where)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if any(is_inexact_dtype(spec.dtype) for spec in ctx.call.results):
            raise without_derivative("pure_callback", ctx.call.where)
        return (None,) * len(ctx.call.results)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: PureCall, *values: Any) -> Any:
        size, mapped = info.batch_size, [dim is not None for dim in in_dims[1:]]
        run, specs = of_each("pure_callback", call.function, call.results, mapped, size)
        moved = [
            x if d is None else x.movedim(d, 0) for x, d in zip(values, in_dims[1:], strict=True)
        ]
        if call.vectorized:
            run = call.function
            moved = [
                x if m else x.expand(size, *x.shape) for x, m in zip(moved, mapped, strict=True)
            ]
        results = replace(call, function=run, results=specs)(*moved)
        return results, (0,) * len(results)


def as_results(name: str, found: Any, specs: Sequence[TensorSpec]) -> tuple[torch.Tensor, ...]:
    """What a function returned, as tensors of their own.

    Raises:
        ValueError: it is not what was said.
    """
    leaves, tensors = tree.leaves(found), []
    if len(leaves) != len(specs):
        raise ValueError(
            f"{name}: the function returned {len(leaves)} values, and {len(specs)} were announced."
        )
    for leaf, spec in zip(leaves, specs, strict=True):
        tensor = torch.as_tensor(leaf, device=spec.device)
        if tuple(tensor.shape) != tuple(spec.shape) or tensor.dtype != spec.dtype:
            raise ValueError(
                f"{name}: the function returned {_kind(tensor)}, and {_kind(spec)} was announced."
            )
        tensors.append(tensor.detach().clone(memory_format=torch.contiguous_format))
    return tuple(tensors)


def of_each(
    name: str,
    run: Callable[..., Any],
    results: Sequence[TensorSpec],
    mapped: Sequence[bool],
    size: int,
) -> tuple[Callable[..., Any], tuple[TensorSpec, ...]]:
    """A function as one that is called for each example, along dim 0 of its mapped arguments.

    Returns:
        The function, and the specs of its results.
    """

    def each(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = []
        for i in range(size):
            try:
                found = run(*(x[i] if m else x for x, m in zip(values, mapped, strict=True)))
            except CheckError as error:
                error.message += f", in example {i}"
                raise
            rows.append(as_results(name, found, results) if results else ())
        return tuple(map(torch.stack, zip(*rows, strict=True)))

    return each, tuple(contiguous((size, *spec.shape), spec.dtype, spec.device) for spec in results)


def _kind(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def without_derivative(name: str, where: str) -> DerivativeError:
    """The error to raise where an opaque function would be differentiated."""
    return DerivativeError(
        f"{where}{name}: the function that it calls has no derivative: state one by custom_vjp or "
        "custom_jvp, or detach() its arguments."
    )
