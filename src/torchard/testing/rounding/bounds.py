"""How far roundings may move a program's values: measured by perturbed runs in double precision."""

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

# An error may be this many times as large as the largest error of all elements in the perturbed runs.
# The bound is not per element, because kernels do not bound errors per element (see torch's gelu in its
# tail).
_OVER_LARGEST = 4.0
# An element that moves by this many times as much as most elements, and as the largest element's rounding
# error, is at a jump or next to a pole. It does not widen the bound of other elements.
_OUTLYING = 1e3


@dataclass(frozen=True)
class Expected:
    """The expected value, and by how much roundings may move it.

    Attributes:
        exact: the value, in double precision.
        bound: the largest error of each element, as a tensor of the value's shape; infinite where no
            perturbed run is finite. None if the value is never rounded (integers, booleans).
        turned: a mask of the elements that roundings turn from finite to infinite or NaN, or back.
    """

    exact: torch.Tensor
    bound: torch.Tensor | None
    turned: torch.Tensor | None = None

    def widened(self, other: Expected, everywhere: bool) -> Expected:
        """This value with a wider bound: the bound of another computation of the value is added.

        Args:
            everywhere: whether the bound of every element is widened. If not, only those of elements that
                this computation does not round.
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
        """The error of each element divided by its bound; rounding does not explain more than 1.

        Where the bound is infinite, any error gives infinity: a missing bound makes no result correct.
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
        program: a program over global values, on one device.
        inputs: the program's inputs, in their own precision.
        nodes: the nodes whose values are expected; each value is one tensor.
        precision: the precision of the function whose values are compared with these. Operations count
            as computed, and inputs as held, in its dtypes.
        runs: the number of perturbed runs that measure the bounds.
        seed: the seed of the perturbations.

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
    """The inputs that the compared function rounds before it uses them, rounded to its dtypes."""
    found: dict[fx.Node, torch.Tensor] = {}
    dtypes = precision.of_inputs(program)
    for node, x in zip(program.placeholders, inputs, strict=True):
        if node in dtypes and is_inexact(x):
            near = rounded(x.detach(), dtypes[node])
            if not bool(alike(near, as_double(x)).all()):
                found[node] = near
    return found


class _Spread:
    """The distances of perturbed values from the exact value."""

    def __init__(self, exact: torch.Tensor, dtype: torch.dtype) -> None:
        self.exact, self.dtype = exact, dtype
        self.moved = torch.zeros(exact.shape, dtype=torch.bool)
        self.furthest = torch.zeros(exact.shape, dtype=torch.float64)  # over finite values
        self.turned = torch.zeros(exact.shape, dtype=torch.bool)
        self.known = torch.zeros(exact.shape, dtype=torch.bool)

    def add(self, value: torch.Tensor) -> None:
        """Include the values of one more run."""
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
        underflow = torch.finfo(self.dtype).smallest_normal  # smaller values may be rounded to zero
        outlying = self.furthest > _OUTLYING * self._usual
        bound = torch.zeros_like(self.furthest)
        for group in (self.moved & outlying, self.moved & ~outlying):
            if group.any():
                bound[group] = _OVER_LARGEST * self.furthest[group].max() + underflow
        if self.moved.any() and self.dtype == torch.float64:
            # The exact value is computed in float64 too, so it is as inexact as the runs, even where
            # no run moves it.
            bound = 2 * bound + torch.finfo(self.dtype).eps * self._largest
        unknown = self.turned & ~self.known
        return Expected(self.exact, bound.masked_fill(unknown, torch.inf), self.turned)

    @property
    def _usual(self) -> float:
        """The usual movement: the median over moved elements, at least the largest's rounding error."""
        moved = self.furthest[self.furthest > 0]
        median = float(moved.median()) if moved.numel() else 0.0
        return max(median, unit_roundoff(self.dtype) * self._largest)

    @property
    def _largest(self) -> float:
        sizes = self.exact.abs()
        finite = sizes[sizes.isfinite()]
        return float(finite.max()) if finite.numel() else 0.0
