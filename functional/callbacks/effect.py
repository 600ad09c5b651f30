"""Effect: the target of the node that a call of a Python function is in a program; its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.callbacks.pure import as_results, of_each, without_derivative
from torchard.functional.core.errors import DerivativeError
from torchard.functional.core.tensor_spec import contiguous, is_inexact_dtype
from torchard.functional.programs.markers import Effect, first
from torchard.functional.tracing.trace_state import active, is_silent

__all__ = ["performed", "threaded"]

Tensors = Sequence[torch.Tensor]


def performed(
    effect: Effect, values: Tensors, token: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Perform an effect after the one before it: a token, and its results.

    Args:
        token: that of the one before; if None, of the last one in the trace in progress.

    Raises:
        DerivativeError: its result is needed a second time, to compute a derivative.
    """
    state = active()
    if is_silent():
        if not effect.results:
            return (first() if token is None else token,)
        raise DerivativeError(
            f"{effect.where}{effect.name}: its result is needed to compute a derivative, for which the "
            "function runs again, and a call with effects does not. Use pure_callback, or call it "
            "outside and pass the result."
        )
    if token is None:
        token = first() if state is None else state.token(state.is_backward())
    apply: Any = _Performed.apply
    made: tuple[torch.Tensor, ...] = apply(effect, token, *values)
    if state is not None:
        state.put_token(made[0], state.is_backward())
    return made


class _Performed(torch.autograd.Function):
    """An effect, which is performed for each example of a vmap."""

    @staticmethod
    def forward(effect: Effect, token: torch.Tensor, *values: torch.Tensor) -> Any:
        state = active()
        if state is not None:
            specs = contiguous((), torch.bool, torch.device("cpu")), *effect.results
            return state.recorded(effect, (token, *values), specs)
        if any(isinstance(x, internals.FakeTensor) for x in (token, *values)):  # a tape is recorded
            return (first(), *(spec.empty() for spec in effect.results))
        found = effect.perform(*(x.detach() for x in values))
        return first(), *(as_results(effect.name, found, effect.results) if effect.results else ())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.effect = inputs[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in output if not is_inexact_dtype(x.dtype)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if any(grad is not None for grad in grads):
            raise without_derivative(ctx.effect.name, ctx.effect.where)
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if any(is_inexact_dtype(spec.dtype) for spec in ctx.effect.results):
            raise without_derivative(ctx.effect.name, ctx.effect.where)
        return (None,) * (1 + len(ctx.effect.results))

    @staticmethod
    def vmap(info: Any, in_dims: Any, effect: Effect, token: torch.Tensor, *values: Any) -> Any:
        if in_dims[1] is not None:
            token = token.select(in_dims[1], 0)
        dims = in_dims[2:]
        if all(dim is None for dim in dims):
            results = effect(token, *values)
            return results, (None,) * len(results)
        moved = (x if d is None else x.movedim(d, 0) for x, d in zip(values, dims, strict=True))
        mapped = [dim is not None for dim in dims]
        run, specs = of_each(effect.name, effect.perform, effect.results, mapped, info.batch_size)
        results = replace(effect, perform=run, results=specs)(token, *moved)
        return results, (None, *(0 for _ in specs))


# -- order --------------------------------------------------------------------------------------------


def threaded(fn: Callable[..., Any]) -> Callable[..., tuple[Any, torch.Tensor]]:
    """A function that takes the token before its effects, and returns that after them, too."""

    def run(token: torch.Tensor, *args: Any) -> tuple[Any, torch.Tensor]:
        state = active()
        assert state is not None
        state.put_token(state.operand(token))
        result = fn(*args)
        return result, state.tokens.pop(False)

    run.__name__ = getattr(fn, "__name__", "threaded")
    return run
