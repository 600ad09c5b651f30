"""Derivatives along a line by finite differences, with errors that are measured.

A difference is off by truncation, which grows with the step, and by the rounding of the two values over
the step. Truncation is estimated from a second step (Richardson), rounding by evaluating the function
again with the rounding of each of its operations put in at random.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from torchard.testing.laws.modes import Fn, Vector
from torchard.testing.rounding.noise import Noise

__all__ = ["Estimate", "Line", "joined"]

# Steps, each a quarter of the one before: the smallest resolve features of size 1e-12.
_STEPS = tuple(2.0**-n for n in range(2, 46, 2))
# Indices of the steps at which rounding is measured; between two of them, the larger value is used.
_MEASURED = (0, 1, 3, 8, len(_STEPS) - 1)
# The bound of an error is its estimate times this factor.
_OVER_ESTIMATE = 40.0
_EPS = torch.finfo(torch.float64).eps
# Noise that is detected in values is at most this fraction of the largest value.
_SEEN = 1e-10
# A jump is the difference that remains between both sides at this many of the smallest steps.
_SMALLEST = 5


def joined(vector: Vector) -> torch.Tensor:
    """All entries in one row, complex if some are."""
    wide = torch.complex128 if any(x.is_complex() for x in vector) else torch.float64
    rows = [x.detach().reshape(-1).to("cpu", wide) for x in vector]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=wide)


@dataclass(frozen=True)
class Estimate:
    """Derivatives by finite differences, in one row.

    Attributes:
        value: the derivative of each element.
        spread: at a kink, the distance of both one-sided derivatives from ``value``; else 0.
        error: the estimated error of the value.
        jump: a mask of elements that jump at the very point, so that they have no derivative.
    """

    value: torch.Tensor
    spread: torch.Tensor
    error: torch.Tensor
    jump: torch.Tensor

    def bound(self, noise: torch.Tensor) -> torch.Tensor:
        """How far a right derivative with this rounding error may be outside of the interval."""
        return _OVER_ESTIMATE * (self.error + noise)

    def away(self, derivative: torch.Tensor) -> torch.Tensor:
        """How far a derivative is outside of the interval."""
        return ((derivative - self.value).abs() - self.spread).clamp(min=0)

    def excess(self, derivative: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """How far a derivative is outside of the interval, over the bound; 0 where that is unknown."""
        away = self.away(derivative)
        excess = torch.where(away > 0, away / self.bound(noise), 0.0)
        excess = torch.where(excess.isnan(), torch.inf, excess)
        return torch.where(self.known & ~self.jump, excess, 0.0)

    @property
    def known(self) -> torch.Tensor:
        """Where there is an estimate: not next to an infinity or NaN."""
        return self.error.isfinite() & self.value.isfinite()

    @property
    def kink(self) -> torch.Tensor:
        """Where the function has no derivative at the very point."""
        return self.jump | (self.spread > 0)


@dataclass
class Line:
    """A function on a line, in one row: t to fn(at + t direction)."""

    fn: Fn
    at: Vector
    direction: Vector

    def __call__(self, t: float) -> torch.Tensor:
        return joined(self.fn(*(x + t * v for x, v in zip(self.at, self.direction, strict=True))))

    def central(self, step: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The central difference, and the sum of the outer values, which shows how bent fn is."""
        right, left = self(step), self(-step)
        return (right - left) / (2 * step), right + left

    def extrapolated(self, step: float) -> torch.Tensor:
        """The central difference, extrapolated from two steps: its truncation is of fourth order."""
        wide, narrow = self.central(step)[0], self.central(step / 2)[0]
        return narrow + (narrow - wide) / 3

    def estimate(self) -> Estimate:
        """For each element, the estimate with the step that is best for it."""
        here = self(0.0)
        sides = [(self(h), self(-h)) for h in _STEPS]
        right, left = (torch.stack(side) for side in zip(*sides, strict=True))
        steps = torch.tensor(_STEPS, dtype=torch.float64)[:, None]
        noise = _between(torch.stack([self._noise(_STEPS[i]) for i in _MEASURED]))
        largest = float(here.abs().nan_to_num(posinf=0.0).max()) if here.numel() else 0.0
        # Kernels promise no more than the roundoff of the largest element.
        noise = noise.clamp(min=_EPS * largest)
        noise = torch.maximum(noise, _seen(right - left, _SEEN * largest))
        values = (right - left) / (2 * steps)
        gaps = (right - 2 * here + left).abs() / steps
        rounding = noise / steps
        value = values[1:] + (values[1:] - values[:-1]) / 15
        # A quarter of the step is a quarter of the gap of a smooth function; the gap of a kink stays.
        stays = (gaps[1:] > 0.6 * gaps[:-1]) & (gaps[1:] > 4 * rounding[1:])
        spread = torch.where(stays, gaps[1:] / 2, 0.0)
        error = (values[1:] - values[:-1]).abs() + 2 * rounding[1:]
        # So does that of waves shorter than the step, whose slopes grow: these steps say nothing.
        error = error.masked_fill(stays & ~_converges(here, right, left, steps), torch.inf)
        error = torch.maximum(error, _from_neighbours(value))
        error = torch.maximum(error, _from_smaller(value, rounding[1:]))
        least = (error + spread).nan_to_num(nan=torch.inf).argmin(0, keepdim=True)
        value, spread, error = (x.gather(0, least).squeeze(0) for x in (value, spread, error))
        return Estimate(value, spread, error, _jumps(here, right, left, noise))

    def _noise(self, step: float) -> torch.Tensor:
        """The distance by which rounding moves the values one step to either side."""
        right, left = (
            self._measured.at(torch.tensor(t, dtype=torch.float64), *self.at) for t in (step, -step)
        )
        return torch.maximum(right, left)

    @functools.cached_property
    def _measured(self) -> Noise:
        t = torch.tensor(_STEPS[len(_STEPS) // 2], dtype=torch.float64)
        return Noise(self._from, (t, *self.at))

    def _from(self, t: torch.Tensor, *at: torch.Tensor) -> Vector:
        return self.fn(*(x + t * v for x, v in zip(at, self.direction, strict=True)))


def _converges(
    here: torch.Tensor, right: torch.Tensor, left: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """Where the slopes of both sides, that differ, hardly change from one step to the next."""
    slopes = (right - here) / steps, (here - left) / steps
    change = sum((slope[1:] - slope[:-1]).abs() for slope in slopes)
    return change < 0.5 * (slopes[0] - slopes[1]).abs()[1:]


def _seen(apart: torch.Tensor, most: float) -> torch.Tensor:
    """The noise in the values of each element, whatever its origin, such as cancellation in a kernel.

    The difference over a step is four times the difference over a quarter of the step, except for
    truncation, which grows with the step, and noise, which does not.

    Args:
        apart: the values on the right minus the values on the left, by step, the largest step first.
        most: larger differences do not count as noise: a function that saturates does not grow either.
    """
    off = (apart[:-1] - 4 * apart[1:]).abs() / 5
    stays = off[2:] > torch.maximum(off[1:-1], off[:-2]) / 4
    return torch.where(stays & (off[2:] <= most), off[2:], 0.0).amax(0)


def _jumps(
    here: torch.Tensor, right: torch.Tensor, left: torch.Tensor, noise: torch.Tensor
) -> torch.Tensor:
    """Where values on the two sides do not meet as the step shrinks."""
    away = torch.stack([(right - left).abs(), (right - here).abs(), (left - here).abs()]).amax(0)
    least, most = away[-_SMALLEST:].amin(0), away[-_SMALLEST:].amax(0)
    above = (least > 64 * noise[-_SMALLEST:].amax(0)) & (least > 1e-3 * away[0])
    return above & (least > 0.5 * most)


def _between(measured: torch.Tensor) -> torch.Tensor:
    """The noise at each step, of that at some."""
    pairs = zip(_MEASURED, _MEASURED[1:], measured, measured[1:], strict=False)
    rows = [torch.maximum(a, b).expand(end - start, -1) for start, end, a, b in pairs]
    return torch.cat([*rows, measured[-1:]])


def _from_smaller(values: torch.Tensor, rounding: torch.Tensor) -> torch.Tensor:
    """How far the value by each step is from those by smaller steps, beyond the rounding of these.

    Steps over many periods of a wave agree with one another by chance, and not with small ones.
    """
    rows = []
    for i, value in enumerate(values):
        apart = (values[i + 1 :] - value).abs() - 8 * rounding[i + 1 :]
        apart = torch.where(apart.isfinite(), apart, 0.0).clamp(min=0)
        rows.append(apart.amax(0) if len(apart) else torch.zeros_like(value, dtype=apart.dtype))
    return torch.stack(rows)


def _from_neighbours(values: torch.Tensor) -> torch.Tensor:
    """How far the value by each step is from those by the steps next to it.

    The least of many estimated errors is one that is small by chance, where two parts of the error
    cancel; they do not cancel at the next steps too.
    """
    apart = (values[1:] - values[:-1]).abs()
    apart = torch.where(apart.isfinite(), apart, 0.0)  # a step that leaves fn's domain says nothing
    none = torch.zeros_like(apart[:1])
    return torch.maximum(torch.cat([apart, none]), torch.cat([none, apart]))
