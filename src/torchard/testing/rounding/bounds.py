"""How far roundings may move the values of a program: measured by perturbed runs in double precision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchard.functional.core.tensor_spec import is_inexact
from torchard.functional.programs.program import Program
from torchard.functional.programs.tags import VAL
from torchard.testing.rounding.in_double import InDouble, Perturbed, as_double
from torchard.testing.rounding.precision import OWN, Precision
from torchard.testing.rounding.roundings import alike, rounded, roundings_of, unit_roundoff

__all__ = ["Expected", "expected"]

# How much larger an error may be than the largest of all elements over the perturbed runs: kernels
# promise no more for each element (torch's gelu in its tail does not).
_OVER_LARGEST = 4.0
# An element that moves by so much more than most do, and than the largest is rounded, says nothing of
# others: it is at a jump, or next to a pole.
_OUTLYING = 1e3


@dataclass(frozen=True)
class Expected:
    """The expected value, and by how much roundings may move it.

    Attributes:
        exact: the value, in double precision.
        bound: the largest error of each element, of the same shape, infinite where no perturbed run is
            finite; None where rounding has no part in the value (integers, booleans), which is exact.
        turned: where roundings make a finite value infinite or NaN, or the other way round.
    """

    exact: torch.Tensor
    bound: torch.Tensor | None
    turned: torch.Tensor | None = None

    def widened(self, other: Expected, everywhere: bool) -> Expected:
        """The same value, with the bound of another computation of it added.

        Args:
            everywhere: or only to elements that this computation does not round.
        """
        if self.bound is None or other.bound is None:
            return self
        bound = self.bound + other.bound
        if not everywhere:
            bound = torch.where(self.bound == 0, bound, self.bound)
        if self.turned is None or other.turned is None:
            turned = other.turned if self.turned is None else self.turned
        else:
            turned = self.turned | other.turned
        return Expected(self.exact, bound, turned)

    def excess(self, value: torch.Tensor) -> torch.Tensor:
        """The error of each element over its bound; above 1 rounding does not explain it.

        An error without a finite bound is infinitely far above it: nothing is right for want of a bound.
        """
        exact = self.exact
        if self.bound is None:
            return torch.where(value == exact, 0.0, torch.inf)
        wide = value.detach().to("cpu", exact.dtype)
        same = alike(wide, exact)
        error = torch.where(same, 0.0, (wide - exact).abs())
        error = torch.where(error.isnan(), torch.inf, error)
        if self.turned is not None:
            error = torch.where(self.turned & ~(wide.isfinite() & exact.isfinite()), 0.0, error)
        unknown = self.bound.isinf() & (error > 0)
        return torch.where(error == 0, 0.0, error / self.bound).masked_fill(unknown, torch.inf)

    def error(self, value: torch.Tensor) -> float:
        """The largest absolute error of an element."""
        kind = torch.complex128 if self.exact.is_complex() else torch.float64
        wide, exact = value.detach().to("cpu", kind), self.exact.to(kind)
        same = alike(wide, exact)
        error = torch.where(same, 0.0, (wide - exact).abs()).nan_to_num(torch.inf, torch.inf)
        return float(error.max()) if error.numel() else 0.0


def expected(
    program: Program,
    inputs: Sequence[Any],
    nodes: Iterable[fx.Node],
    *,
    precision: Precision = OWN,
    runs: int = 6,
    seed: int = 0,
) -> dict[fx.Node, Expected]:
    """The expected values of a program, with bounds for their errors.

    Args:
        program: over global values, on one device.
        inputs: of the program, in their own precision.
        nodes: whose value is one tensor.
        precision: in which operations count as done, and inputs as held: that of the function whose
            values are compared with these.
        runs: how many perturbed runs measure the bounds.
        seed: of the perturbations.

    Returns:
        For each node, its `Expected`.
    """
    nodes = list(dict.fromkeys(nodes))
    values = InDouble(program).evaluate(inputs)
    exact = {node: values[node] for node in nodes}
    floats = [node for node in nodes if is_inexact(exact[node])]
    spreads = {node: _Spread(exact[node], precision.counted(VAL.of(node).dtype)) for node in floats}
    held = _held(program, inputs, precision)
    roundings = roundings_of(program, values, precision.counted, held)
    now = [held.get(node, x) for node, x in zip(program.placeholders, inputs, strict=True)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(runs if roundings or held else 0):
        values = Perturbed(program, roundings, generator).evaluate(now)
        for node, spread in spreads.items():
            spread.add(values[node])
    return {
        node: spreads[node].expected if node in spreads else Expected(exact[node], None)
        for node in nodes
    }


def _held(
    program: Program, inputs: Sequence[Any], precision: Precision
) -> dict[fx.Node, torch.Tensor]:
    """The inputs that the other function rounds before it computes with them, as it holds them."""
    found: dict[fx.Node, torch.Tensor] = {}
    dtypes = precision.of_inputs(program)
    for node, x in zip(program.placeholders, inputs, strict=True):
        if node in dtypes and is_inexact(x):
            near = rounded(x.detach(), dtypes[node])
            if not bool(alike(near, as_double(x)).all()):
                found[node] = near
    return found


class _Spread:
    """How far perturbed values are from the exact one."""

    def __init__(self, exact: torch.Tensor, dtype: torch.dtype) -> None:
        self.exact, self.dtype = exact, dtype
        self.moved = torch.zeros(exact.shape, dtype=torch.bool)
        self.furthest = torch.zeros(exact.shape, dtype=torch.float64)  # in finite values
        self.turned = torch.zeros(exact.shape, dtype=torch.bool)
        self.known = torch.zeros(exact.shape, dtype=torch.bool)

    def add(self, value: torch.Tensor) -> None:
        """Note the values of one more run."""
        same = alike(value, self.exact)
        away = torch.where(same, 0.0, (value - self.exact).abs())
        finite = away.isfinite()
        self.moved |= away != 0
        self.turned |= ~finite
        self.known |= finite
        self.furthest = torch.maximum(self.furthest, torch.where(finite, away, 0.0))

    @property
    def expected(self) -> Expected:
        """The value, with a bound of zero for elements that no rounding moves."""
        underflow = torch.finfo(self.dtype).smallest_normal  # what is smaller may be rounded to zero
        outlying = self.furthest > _OUTLYING * self._usual
        bound = torch.zeros_like(self.furthest)
        for group in (self.moved & outlying, self.moved & ~outlying):
            if group.any():
                bound[group] = _OVER_LARGEST * self.furthest[group].max() + underflow
        if self.moved.any() and self.dtype == torch.float64:
            # The exact value is computed in that too: it is as far off, and where no run moves it.
            bound = 2 * bound + torch.finfo(self.dtype).eps * self._largest
        unknown = self.turned & ~self.known
        return Expected(self.exact, bound.masked_fill(unknown, torch.inf), self.turned)

    @property
    def _usual(self) -> float:
        """By how much elements move at least: half of those that do, or as the largest is rounded."""
        moved = self.furthest[self.furthest > 0]
        median = float(moved.median()) if moved.numel() else 0.0
        return max(median, unit_roundoff(self.dtype) * self._largest)

    @property
    def _largest(self) -> float:
        sizes = self.exact.abs()
        finite = sizes[sizes.isfinite()]
        return float(finite.max()) if finite.numel() else 0.0
