"""check_derivatives: forward mode, reverse mode and finite differences agree, to any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.testing.derived import as_primal
from torchard.testing.laws.converted import check_converted, check_double
from torchard.testing.rounding.in_double import as_double
from torchard.testing.rounding.roundings import is_float

__all__ = ["check_derivatives"]

Vector = tuple[torch.Tensor, ...]
Fn = Callable[..., Vector]

# Steps of finite differences, of which each element takes the one with the least error.
_STEPS = tuple(2.0**-n for n in range(5, 26, 2))
# How much larger a difference may be than the error estimated for it: their product is the bound.
_OVER_ESTIMATE = 20.0
_ROUNDOFF = torch.finfo(torch.float64).eps


@checked
def check_derivatives(
    fn: Callable[..., Any],
    *args: Any,
    order: int = 2,
    modes: Sequence[str] = ("forward", "reverse"),
    directions: int = 3,
    seed: int = 0,
) -> None:
    """Assert that a function's derivatives are right, in float64 along random directions.

    Forward mode is compared with finite differences, whose step is chosen for each element by the least
    estimated error: of Richardson's estimate of truncation, rounding over the step, and the distance from
    what the next steps give, the largest. At a kink, where the differences from the left and from the
    right do not meet, the derivative must lie between them.
    Reverse mode is compared with forward mode by inner products: <c, J v> = <J' c, v>. Each further
    order does the same to the gradient.

    Args:
        fn: a pure function of pytrees.
        args: its arguments. Floating tensors are converted to float64.
        order: up to which order derivatives are checked.
        modes: "forward", "reverse" or both; reverse mode alone is compared with finite differences.
        directions: how many directions are drawn.
        seed: of the directions.

    Raises:
        AssertionError: a derivative is wrong; says of which order and mode, where, and what it should be.
        TypeError: the function takes its arguments, but not in float64, or it computes in less than that.

    Source: the dot-product test of adjoints, Griewank, Walther, Evaluating Derivatives, 2008, section 3;
    ``torch.autograd.gradcheck`` and ``jax.test_util.check_grads`` for the two modes; Ridders, "Accurate
    computation of F'(x) and F'(x)F''(x)", Adv. Eng. Software 4 (1982), for errors by neighbouring steps.

    >>> import torch
    >>> from torchard.testing import check_derivatives
    >>> check_derivatives(torch.nn.functional.gelu, torch.tensor([-1.0, 0.0, 2.0]))
    >>> class Cube(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(x):
    ...         return x ** 3
    ...     @staticmethod
    ...     def setup_context(ctx, inputs, output):
    ...         ctx.save_for_backward(*inputs)
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         return g * 2 * ctx.saved_tensors[0] ** 2
    >>> check_derivatives(Cube.apply, torch.tensor([1.0, 2.0]), modes=["reverse"], order=1)
    Traceback (most recent call last):
        ...
    AssertionError: reverse mode of order 1 is wrong: ...
    """
    unknown = set(modes) - {"forward", "reverse"}
    if unknown or not modes:
        raise ValueError(f"modes is {list(modes)!r}; it lists 'forward', 'reverse' or both")
    generator = torch.Generator().manual_seed(seed)
    doubles = tree.map(as_double, tree.whole(args))
    check_converted("check_derivatives", fn, args, doubles, torch.float64)
    check_double("check_derivatives", fn, doubles)
    flat, at, paths = _flat(fn, doubles)
    if not at:
        raise ValueError("check_derivatives: no argument has a floating tensor to differentiate in")
    for level in range(1, order + 1):
        for _ in range(directions):
            direction = _random_like(at, generator)
            _check(_Level(flat, level, tuple(modes), paths), at, direction, generator)
        flat = _gradient_along(flat, _random_like(flat(*at), generator), "reverse" in modes)


def _flat(fn: Callable[..., Any], args: Any) -> tuple[Fn, Vector, list[str]]:
    """fn from its floating leaves to its floating results."""
    floats, rest = tree.partition(args)
    leaves, structure = tree.flatten(floats)

    def flat(*some: torch.Tensor) -> Vector:
        result = fn(*tree.combine(tree.unflatten(structure, some), rest))
        return tuple(r for r in tree.leaves(tree.whole(result)) if is_float(r))

    return flat, tuple(map(as_primal, leaves)), tree.paths(floats, "args")


@dataclass(frozen=True)
class _Level:
    """A function whose derivative is checked: the function itself, or a gradient of it."""

    fn: Fn
    order: int
    modes: tuple[str, ...]
    paths: list[str]

    def name_of(self, result: int) -> str:
        return f"result {result}" if self.order == 1 else f"the gradient of {self.paths[result]}"


def _check(level: _Level, at: Vector, direction: Vector, generator: torch.Generator) -> None:
    here = level.fn(*at)
    forward = None
    if "forward" in level.modes:
        forward = torch.func.jvp(level.fn, at, direction)[1]
        _compare_with_differences(level, at, direction, here, forward)
    if "reverse" in level.modes:
        pull = torch.func.vjp(level.fn, *at)[1]
        # What is infinite or NaN has no derivative, and takes no part in a product.
        cotangents = _where_finite(here, _random_like(here, generator))
        pulled = float(_inner(pull(cotangents), direction))
        if forward is not None:
            _check_product(level, pulled, cotangents, _where_finite(here, forward))
        else:
            _check_along(level, at, direction, cotangents, pulled)


def _check_product(level: _Level, pulled: float, cotangents: Vector, forward: Vector) -> None:
    pushed = float(_inner(cotangents, forward))
    scale = float(_inner(_absolute(cotangents), _absolute(forward)))
    bound = 1e4 * _ROUNDOFF * max(scale, abs(pulled))
    if not abs(pulled - pushed) <= bound:
        raise AssertionError(
            f"reverse mode of order {level.order} is wrong or forward mode is: <c, J v> is "
            f"{pushed:.10g}, <J' c, v> is {pulled:.10g}, for random v and c{_off(pulled - pushed, bound)}"
        )


def _check_along(
    level: _Level, at: Vector, direction: Vector, cotangents: Vector, pulled: float
) -> None:
    """Reverse mode alone: its product with a direction against differences of <c, f>."""
    here = level.fn(*at)

    def product(*xs: torch.Tensor) -> Vector:
        return (_inner(cotangents, _where_finite(here, level.fn(*xs))),)

    estimate = _differences(product, at, direction)[0]
    if not bool(estimate.known):
        raise AssertionError(_unknown(level, "<c, f>", 1))
    given = torch.tensor(pulled, dtype=torch.float64)
    if float(estimate.excess(given)) > 1:
        raise AssertionError(
            f"reverse mode of order {level.order} is wrong: <J' c, v> is {pulled:.10g}, and finite "
            f"differences of <c, f> along v are {float(estimate.value):.10g}"
            f"{_off(float(estimate.away(given)), float(estimate.bound))}"
        )


def _compare_with_differences(
    level: _Level, at: Vector, direction: Vector, here: Vector, forward: Vector
) -> None:
    estimates = _differences(level.fn, at, direction)
    for i, (value, tangent, estimate) in enumerate(zip(here, forward, estimates, strict=True)):
        finite = value.isfinite()
        if finite.any() and not (finite & estimate.known).any():
            raise AssertionError(_unknown(level, level.name_of(i), int(finite.sum())))
        excess = torch.where(finite, estimate.excess(tangent), 0.0)
        if not excess.numel() or float(excess.max()) <= 1:
            continue
        place = tuple(int(n) for n in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"forward mode of order {level.order} is wrong at {list(place)} of {level.name_of(i)}: "
            f"{_number(tangent[place])}, and finite differences are {_number(estimate.value[place])}"
            f"{_off(float(estimate.away(tangent)[place]), float(estimate.bound[place]))}"
        )


def _off(difference: float, bound: float) -> str:
    times = abs(difference) / bound if bound else torch.inf
    return f"; they are {abs(difference):.2e} apart, {times:.3g} times the bound of {bound:.1e}"


def _unknown(level: _Level, what: str, count: int) -> str:
    return (
        f"order {level.order} cannot be checked: beside the given arguments {what} is infinite or NaN, "
        f"so that none of its {count} finite elements has a finite difference; give arguments from "
        "inside of the function's domain"
    )


# -- finite differences -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Estimate:
    """Derivatives by finite differences: an interval (a point, but at kinks) and its error."""

    value: torch.Tensor
    spread: torch.Tensor
    error: torch.Tensor

    @property
    def bound(self) -> torch.Tensor:
        """How far a right derivative may be outside of the interval."""
        return _OVER_ESTIMATE * self.error

    def away(self, derivative: torch.Tensor) -> torch.Tensor:
        """How far a derivative is outside of the interval."""
        return ((derivative - self.value).abs() - self.spread).clamp(min=0)

    def excess(self, derivative: torch.Tensor) -> torch.Tensor:
        """How far a derivative is outside of the interval, over the bound; 0 where that is unknown."""
        away = self.away(derivative)
        excess = torch.where(away > 0, away / self.bound, 0.0)
        return torch.where(self.known, torch.where(excess.isnan(), torch.inf, excess), 0.0)

    @property
    def known(self) -> torch.Tensor:
        """Where there is an estimate: not beside an infinity or NaN."""
        return self.error.isfinite() & self.value.isfinite()


def _differences(fn: Fn, at: Vector, direction: Vector) -> list[_Estimate]:
    """For each result, the estimate with the step that is best for each element."""
    here = fn(*at)
    by_step = []
    for step in _STEPS:
        moved = [_moved(fn, at, direction, s * step) for s in (1.0, -1.0, 0.5, -0.5)]
        by_step.append([_estimate(h, values, step) for h, *values in zip(here, *moved, strict=True)])
    return [_best(estimates) for estimates in zip(*by_step, strict=True)]


def _moved(fn: Fn, at: Vector, direction: Vector, step: float) -> Vector:
    return fn(*(x + step * v for x, v in zip(at, direction, strict=True)))


def _estimate(here: torch.Tensor, values: Sequence[torch.Tensor], step: float) -> _Estimate:
    """By central differences, extrapolated; where the two sides do not meet, by both."""
    right, left, right_near, left_near = values
    wide, narrow = (right - left) / (2 * step), (right_near - left_near) / step
    rounding = 8 * _ROUNDOFF * torch.stack([v.abs() for v in (here, *values)]).amax(0) / step
    truncation = (narrow - wide).abs()
    gap, gap_near = (
        (right - 2 * here + left).abs() / step,
        2 * (right_near - 2 * here + left_near).abs() / step,
    )
    # Half the step halves the gap of a smooth function; the gap of a kink stays.
    kink = (gap_near > 0.75 * gap) & (gap_near > 4 * rounding)
    spread = torch.where(kink, gap_near / 2, 0.0)
    return _Estimate(narrow + (narrow - wide) / 3, spread, truncation + rounding)


def _best(estimates: Sequence[_Estimate]) -> _Estimate:
    """Of the estimates by each step, for each element the one with the least error."""
    values = torch.stack([e.value for e in estimates])
    spreads = torch.stack([e.spread for e in estimates])
    errors = torch.stack([e.error for e in estimates])
    errors = torch.maximum(errors, _from_neighbours(values))
    least = (errors + spreads).nan_to_num(nan=torch.inf).argmin(0, keepdim=True)
    return _Estimate(*(x.gather(0, least).squeeze(0) for x in (values, spreads, errors)))


def _from_neighbours(values: torch.Tensor) -> torch.Tensor:
    """How far the value by each step is from those by the steps next to it.

    The least of many estimated errors is one that is small by chance, where two parts of the error
    cancel; they do not cancel at the next steps too.
    """
    apart = (values[1:] - values[:-1]).abs()
    apart = torch.where(apart.isfinite(), apart, 0.0)  # a step that leaves fn's domain says nothing
    none = torch.zeros_like(apart[:1])
    return torch.maximum(torch.cat([apart, none]), torch.cat([none, apart]))


# -- vectors ------------------------------------------------------------------------------------------


def _random_like(vector: Vector, generator: torch.Generator) -> Vector:
    return tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in vector)


def _where_finite(here: Vector, values: Vector) -> Vector:
    """Values, but zero at elements that are infinite or NaN here."""
    return tuple(torch.where(x.isfinite(), y, 0) for x, y in zip(here, values, strict=True))


def _inner(xs: Vector, ys: Vector) -> torch.Tensor:
    """The real inner product."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(xs, ys, strict=True):
        total = total + ((x.conj() * y).real if x.is_complex() else x * y).sum()
    return total


def _absolute(vector: Vector) -> Vector:
    return tuple(x.abs() for x in vector)


def _gradient_along(fn: Fn, cotangents: Vector, reverse: bool) -> Fn:
    """The gradient of <c, f>: by reverse mode, or entry by entry by forward mode."""

    def product(*xs: torch.Tensor) -> torch.Tensor:
        return _inner(cotangents, fn(*xs))

    def gradient(*xs: torch.Tensor) -> Vector:
        take = torch.func.grad if reverse else torch.func.jacfwd
        found: Vector = take(product, tuple(range(len(xs))))(*xs)
        return found

    return gradient


def _number(x: torch.Tensor) -> str:
    return f"{complex(x):.8g}" if x.is_complex() else f"{float(x):.8g}"
