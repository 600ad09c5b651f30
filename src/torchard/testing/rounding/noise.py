"""Measures by how much rounding moves each element of a function's results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.programs.program import Program
from torchard.testing.rounding.in_double import InDouble, Perturbed
from torchard.testing.rounding.movement import moves
from torchard.testing.rounding.programs import program_of
from torchard.testing.rounding.roundings import roundings_of

__all__ = ["Noise", "nudged"]

_EPS = torch.finfo(torch.float64).eps
# A smaller value may be zero in one of two computations that agree.
_UNDERFLOW = torch.finfo(torch.float64).smallest_normal
# The number of perturbed runs at each point.
_RUNS = 2


def _in_float64(dtype: torch.dtype) -> torch.dtype:
    """float64 for every dtype: the errors of narrower dtypes inside a derivative are not rounding."""
    return torch.float64


class Noise:
    """The rounding errors of a function of float64 tensors, measured by perturbed runs of its program.

    Args:
        fn: a function from tensors to tensors.
        args: the arguments with which the program is recorded. They determine which operations round.
        seed: the seed of the perturbations.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[torch.Tensor, ...], seed: int = 0) -> None:
        self.program, self.inputs = program_of(lambda *xs: tuple(fn(*xs)), args)
        self.count = len(args)
        values = InDouble(self.program).evaluate(self.inputs)
        self.roundings = roundings_of(self.program, values, _in_float64)
        self.generator = torch.Generator().manual_seed(seed)

    def at(self, *args: torch.Tensor, runs: int = _RUNS) -> torch.Tensor:
        """The largest error of each element over ``runs`` perturbed runs, in one row."""
        inputs = [*args, *self.inputs[self.count :]]
        exact = self._results(InDouble(self.program), inputs)
        most = _UNDERFLOW + _EPS / 2 * exact.abs()
        for _ in range(runs):
            moved = self._results(Perturbed(self.program, self.roundings, self.generator), inputs)
            away = (moved - exact).abs()
            most = torch.maximum(most, torch.where(away.isnan(), 0.0, away))
        return most

    def _results(self, interpreter: InDouble, inputs: list[Any]) -> torch.Tensor:
        return _row(self.program, interpreter.evaluate(inputs))


def _row(program: Program, values: dict[fx.Node, Any]) -> torch.Tensor:
    """The results of a program, in one row."""
    results = [values[r] if isinstance(r, fx.Node) else r for r in program.results]
    rows = [x.detach().reshape(-1).cpu() for x in results]
    wide = torch.complex128 if any(x.is_complex() for x in rows) else torch.float64
    return torch.cat([x.to(wide) for x in rows])


# -- which side of a kink -----------------------------------------------------------------------------

# By how much zeros are moved: so little that only their sign matters.
_OFF_ZERO = 1e-30
# The number of runs with random signs, in addition to all values up and all values down.
_NUDGES = 14


def nudged(
    fn: Callable[..., Any], args: tuple[torch.Tensor, ...], size: float = 2.0**-50
) -> tuple[torch.Tensor, torch.Tensor]:
    """A function's results if all of its inputs and intermediate values are moved slightly.

    Unlike rounding, this also moves exact values: a sum that is exactly zero is on one side of a kink in
    some runs and on the other side in others.

    Args:
        fn: a function from tensors to tensors.
        args: its arguments.
        size: the distance by which values move, relative to each value.

    Returns:
        The mean of each element of the results over all runs, and the largest distance of a run from the
        mean; each in one row.
    """
    program, inputs = program_of(lambda *xs: tuple(fn(*xs)), args)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for run in range(2 + _NUDGES):
        sign = (1.0, -1.0)[run] if run < 2 else 0.0
        nudge = _Nudge(size, sign, generator)
        moved = [nudge(x) for x in inputs]
        rows.append(_row(program, _Nudged(program, nudge).evaluate(moved)))
    runs = torch.stack(rows)
    finite = runs.isfinite()
    runs = torch.where(finite, runs, 0.0)
    mean = runs.sum(0) / finite.sum(0).clamp(min=1)
    return mean, torch.where(finite, (runs - mean).abs(), 0.0).amax(0)


@dataclass(frozen=True)
class _Nudge:
    """Moves floating values: all upwards, all downwards, or (sign 0) each in a random direction."""

    size: float
    sign: float
    generator: torch.Generator

    def __call__(self, x: Any) -> Any:
        if not is_inexact(x):
            return x
        sign = torch.full(x.shape, self.sign, dtype=torch.float64)
        if not self.sign:
            sign = torch.randint(0, 2, x.shape, generator=self.generator) * 2.0 - 1
        moved = x + (self.size * x.abs() + _OFF_ZERO) * sign.to(x.device)
        return torch.where(x.isfinite(), moved, x)


class _Nudged(InDouble):
    """Evaluates a program, and moves the results of operations that compute values."""

    def __init__(self, program: Program, nudge: _Nudge) -> None:
        super().__init__(program)
        self.nudge = nudge

    def call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The value of a call, moved unless the operation selects or moves its operands."""
        result = super().call(node, args, kwargs)
        still = moves(node) or node.target is operator.getitem
        return result if still else map_aggregate(result, self.nudge)
