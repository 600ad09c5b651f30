"""By how much rounding moves each element of a function's result, measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from torchard.testing.rounding.in_double import InDouble, Perturbed
from torchard.testing.rounding.programs import program_of
from torchard.testing.rounding.roundings import roundings_of

__all__ = ["Noise"]

_EPS = torch.finfo(torch.float64).eps
# What is smaller may be zero in one of two computations that agree.
_UNDERFLOW = torch.finfo(torch.float64).smallest_normal
# Perturbed runs at one point.
_RUNS = 2


def _in_float64(dtype: torch.dtype) -> torch.dtype:
    """What a derivative loses by computing in less is no rounding of it."""
    return torch.float64


class Noise:
    """The rounding errors of a function of float64 tensors, from runs of its program with others put in.

    Args:
        fn: a function of tensors, to tensors.
        args: where its program is recorded: which operations round is asked there.
        seed: of the perturbations.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[torch.Tensor, ...], seed: int = 0) -> None:
        self.program, self.inputs = program_of(lambda *xs: tuple(fn(*xs)), args)
        self.count = len(args)
        values = InDouble(self.program).evaluate(self.inputs)
        self.roundings = roundings_of(self.program, values, _in_float64)
        self.generator = torch.Generator().manual_seed(seed)

    def at(self, *args: torch.Tensor, runs: int = _RUNS) -> torch.Tensor:
        """The largest error of each element over some perturbed runs, in one row."""
        inputs = [*args, *self.inputs[self.count :]]
        exact = self._results(InDouble(self.program), inputs)
        most = _UNDERFLOW + _EPS / 2 * exact.abs()
        for _ in range(runs):
            moved = self._results(Perturbed(self.program, self.roundings, self.generator), inputs)
            away = (moved - exact).abs()
            most = torch.maximum(most, torch.where(away.isnan(), 0.0, away))
        return most

    def _results(self, interpreter: InDouble, inputs: list[Any]) -> torch.Tensor:
        values = interpreter.evaluate(inputs)
        results = [values[r] if isinstance(r, fx.Node) else r for r in self.program.results]
        rows = [x.detach().reshape(-1).cpu() for x in results]
        wide = torch.complex128 if any(x.is_complex() for x in rows) else torch.float64
        return torch.cat([x.to(wide) for x in rows])
