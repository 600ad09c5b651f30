"""The autograd Function of calls whose derivative is a rule, and what all rules have in common.

torch loses the derivative of what a Function's forward returns only for its own backward: a residual that
is neither an input nor a result. Here a residual is a result, whose derivative is that of the code that
computes it, so derivatives of a rule are right to any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchard.functional import torch_internals as internals
from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.loops.differentiated import kind_of, or_zeros
from torchard.functional.tracing.trace_state import active, current_frames, in_frames

__all__ = ["RuleCall", "applied"]

Tensors = Sequence[torch.Tensor]


class RuleCall(ABC):
    """One call with a rule, as a function of its tensors.

    Attributes:
        count: once it has run, the number of its results; further ones are residuals.
        saved: once it has run, the positions among inputs and results of what the rule reads.
        floating: once it has run, for each of its results and residuals whether it has a derivative.
        applies: while it runs, whether derivatives of its results are the rule's.
    """

    count: int = 0
    saved: Sequence[int] = ()
    floating: Sequence[bool] = ()
    applies = False

    @abstractmethod
    def run(self, inputs: Tensors) -> list[torch.Tensor]:
        """The results, then the residuals that are neither inputs nor results."""

    @abstractmethod
    def pull(self, saved: Tensors, cotangents: Sequence[Any]) -> list[torch.Tensor | None]:
        """The gradient of each input, from what was saved and one cotangent for each floating result."""

    @abstractmethod
    def push(
        self, inputs: Tensors, saved: Tensors, tangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """The tangent of each floating result, from one tangent, or None, for each input."""


def applied(call: RuleCall, inputs: Tensors) -> list[torch.Tensor]:
    """The results of a call, under any transforms of torch.func, and in a trace."""
    apply: Any = _Ruled.apply
    results: Sequence[torch.Tensor] = apply(call, *internals.resolved(inputs))
    return list(results[: call.count])


class _Ruled(torch.autograd.Function):
    """A call with a rule, which returns its residuals too."""

    @staticmethod
    def forward(call: RuleCall, *inputs: torch.Tensor) -> Any:
        call.applies = True
        results = call.run(inputs)
        call.applies = False
        state = active()
        if state is not None:  # even if it records nothing
            state.without_grad |= state.grad_mode
        call.floating = [is_inexact(x) for x in results]
        return tuple(results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *tensors = inputs
        ctx.call, ctx.frames, ctx.inputs = call, current_frames(), len(tensors)
        ctx.floating, ctx.results = tuple(call.floating), [kind_of(x) for x in output]
        values = [*tensors, *output]
        # Derivatives of residuals, and tangents, begin at the inputs.
        again = len(output) > call.count and any(call.floating[call.count :])
        kept = dict.fromkeys([*(range(len(tensors)) if again else ()), *call.saved])
        ctx.kept = {position: i for i, position in enumerate(kept)}
        ctx.save_for_backward(*(values[position] for position in kept))
        forward = dict.fromkeys([*range(len(tensors)), *call.saved])
        ctx.ahead = {position: i for i, position in enumerate(forward)}
        ctx.save_for_forward(*(values[position] for position in forward))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(x for x, floating in zip(output, call.floating, strict=True) if not floating)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: RuleCall = ctx.call
        values = list(map(internals.without_ended_levels, ctx.saved_tensors))
        saved = [values[ctx.kept[position]] for position in call.saved]
        gradients: list[Any] = [None] * ctx.inputs
        with in_frames(ctx.frames):
            if any(g is not None for g in grads[: call.count]):
                cotangents = [
                    or_zeros(grad, kind)
                    for grad, kind, floating in zip(grads, ctx.results, ctx.floating, strict=True)
                    if floating
                ][: sum(ctx.floating[: call.count])]
                gradients = call.pull(saved, cotangents)
            residuals = [i for i in range(call.count, len(grads)) if grads[i] is not None]
            if residuals:
                inputs = [values[ctx.kept[i]] for i in range(ctx.inputs)]
                more = _of_residuals(call, inputs, residuals, [grads[i] for i in residuals])
                gradients = list(map(_added, gradients, more))
        return None, *gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        call: RuleCall = ctx.call
        further = [i for i in range(call.count, len(ctx.floating)) if ctx.floating[i]]
        with internals.below_tangents(ctx.saved_tensors) as values:
            inputs = [values[ctx.ahead[i]] for i in range(ctx.inputs)]
            saved = [values[ctx.ahead[position]] for position in call.saved]
            moved = call.push(inputs, saved, tangents[1:])
            moved += _pushed_residuals(call, inputs, further, tangents[1:])
        pushed = iter(moved)
        return tuple(next(pushed) if floating else None for floating in ctx.floating)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: RuleCall, *inputs: torch.Tensor) -> Any:
        dims = in_dims[1:]
        mapped = tuple(dim is not None for dim in dims)
        moved = [x if d is None else x.movedim(d, 0) for x, d in zip(inputs, dims, strict=True)]
        batched = _Batched(call, mapped, info.randomness)
        apply: Any = _Ruled.apply
        results = apply(batched, *moved)
        call.count, call.saved, call.floating = batched.count, batched.saved, batched.floating
        return results, (0,) * len(results)


@dataclass
class _Batched(RuleCall):
    """A call for many examples: dim 0 of the inputs of the mask, and of all results."""

    call: RuleCall
    mapped: Sequence[bool]
    randomness: str

    def run(self, inputs: Tensors) -> list[torch.Tensor]:
        self.call.applies = self.applies
        results = self._vmapped(lambda xs: tuple(self.call.run(xs)), _dims(self.mapped))(list(inputs))
        self.count, self.saved, self.call.applies = self.call.count, self.call.saved, False
        return list(results)

    def pull(self, saved: Tensors, cotangents: Sequence[Any]) -> list[torch.Tensor | None]:
        present: list[bool] = []

        def pull(saved: Tensors, cotangents: Tensors) -> tuple[torch.Tensor, ...]:
            gradients = self.call.pull(saved, cotangents)
            present[:] = [gradient is not None for gradient in gradients]
            return tuple(gradient for gradient in gradients if gradient is not None)

        every: list[int | None] = [0] * len(cotangents)
        made = iter(self._vmapped(pull, self._dims_of_saved(), every)(list(saved), list(cotangents)))
        gradients = [next(made) if has else None for has in present]
        return [  # all examples use what is not mapped
            gradient if mapped or gradient is None else gradient.sum(0)
            for gradient, mapped in zip(gradients, self.mapped, strict=True)
        ]

    def push(
        self, inputs: Tensors, saved: Tensors, tangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        moved = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def push(inputs: Tensors, saved: Tensors, given: Tensors) -> tuple[torch.Tensor, ...]:
            full: list[torch.Tensor | None] = [None] * len(inputs)
            for i, tangent in zip(moved, given, strict=True):
                full[i] = tangent
            return tuple(self.call.push(inputs, saved, full))

        dims = _dims(self.mapped), self._dims_of_saved(), _dims([self.mapped[i] for i in moved])
        given = [tangents[i] for i in moved]
        return list(self._vmapped(push, *dims)(list(inputs), list(saved), given))

    def _vmapped(self, fn: Callable[..., Any], *dims: list[int | None]) -> Callable[..., Any]:
        made: Callable[..., Any] = torch.vmap(fn, in_dims=dims, randomness=self.randomness)
        return made

    def _dims_of_saved(self) -> list[int | None]:
        count = len(self.mapped)
        return [0 if i >= count or self.mapped[i] else None for i in self.saved]


def _dims(mapped: Sequence[bool]) -> list[int | None]:
    return [0 if m else None for m in mapped]


def _of_residuals(
    call: RuleCall, inputs: Tensors, positions: Sequence[int], cotangents: Tensors
) -> list[torch.Tensor | None]:
    """The gradient of each input from the cotangents of residuals: that of the code that makes them."""
    floating = [i for i, x in enumerate(inputs) if is_inexact(x)]
    residuals = _residuals(call, inputs, floating, positions)
    pulled = iter(torch.func.vjp(residuals, *(inputs[i] for i in floating))[1](tuple(cotangents)))
    return [next(pulled) if i in floating else None for i in range(len(inputs))]


def _pushed_residuals(
    call: RuleCall, inputs: Tensors, positions: Sequence[int], tangents: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """The tangents of residuals, likewise."""
    if not positions:
        return []
    moved = [i for i, tangent in enumerate(tangents) if tangent is not None]
    residuals = _residuals(call, inputs, moved, positions)
    given: Any = tuple(tangents[i] for i in moved)
    return list(torch.func.jvp(residuals, tuple(inputs[i] for i in moved), given)[1])


def _residuals(
    call: RuleCall, inputs: Tensors, of: Sequence[int], positions: Sequence[int]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Some residuals of a call as a function of some of its inputs."""

    def residuals(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(inputs)
        for i, value in zip(of, values, strict=True):
            given[i] = value
        results = call.run(given)
        return tuple(results[i] for i in positions)

    return residuals


def _added(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
