"""One order of derivatives: which derivatives are compared, and the messages if they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchard.testing.laws.converted import check_double
from torchard.testing.laws.finite_differences import Estimate, Line, joined
from torchard.testing.laws.modes import (
    Fn,
    ForwardGradient,
    Gradient,
    Vector,
    along,
    in_some,
    inner,
    pullback,
    pushed,
)
from torchard.testing.laws.vectors import OfVectors, direction_at, random_like, where_finite
from torchard.testing.report import OrderReport
from torchard.testing.rounding.noise import Noise, nudged

__all__ = ["Level"]

# Derivatives that agree this well are accepted at once; all others are examined further. Differences over
# the first step have truncation and rounding errors of 1e-10. Over the second step they are extrapolated,
# and both errors are smaller.
_CLOSE = 1e-7
_CLOSE_SUM = 1e-9  # of a sum, in which one element is to be seen
_CLOSE_PRODUCT = 1e-12
_STRAIGHT = 1e-3
_FIRST_STEP, _SECOND_STEP = 2.0**-17, 2.0**-8
# The largest accepted ratio of the difference of two products to their measured rounding errors.
_OVER_NOISE = 10.0
_FEW = 3  # arguments, of which all choices require gradients in turn
_RUNS = 8  # perturbed runs of values that are measured at a single point
# The largest distance of a kink's derivative from the mean of nudged runs, in radii of these runs.
_AROUND = 4.0
# Nudges by a thousand times as much move a smooth function's values by as many times more.
_NUDGED, _STEEP = (2.0**-50, 2.0**-40), 32.0


@dataclass
class Level:
    """A function whose derivative is checked: the user's, or a gradient of it.

    Attributes:
        fn: the function.
        model: the function whose finite differences are taken: fn, or its straight-through estimator.
        order: the order of the derivative.
        modes: the modes that are compared.
        kinks: whether there may be kinks.
        user: the function that the user gave.
        no_forward: why there is no forward mode.
        kinked: the elements at kinks and jumps.
        unknown: elements whose derivative no differences tell.
        inside: whether what was compared depends on kinks of values on the way, if no result shows them.
    """

    fn: Fn
    model: Fn
    order: int
    modes: tuple[str, ...]
    kinks: bool
    user: OfVectors
    no_forward: str = ""
    kinked: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)
    inside: bool = False

    @property
    def rough(self) -> bool:
        """Whether something here was compared with less than one right value, or not at all."""
        return bool(self.kinked or self.unknown or self.inside)

    def next(self, generator: torch.Generator) -> Level:
        """The level of the gradient of a product with random cotangents."""
        here = self.fn(*self.user.at)
        cotangents = where_finite(here, random_like(here, generator))
        take = Gradient if "reverse" in self.modes else ForwardGradient
        fn = take(self.fn, cotangents)
        model = fn if self.model is self.fn else take(self.model, cotangents)
        return Level(fn, model, self.order + 1, self.modes, self.kinks, self.user)

    def check(self, directions: int, generator: torch.Generator) -> OrderReport:
        """Compare along random directions.

        Raises:
            AssertionError: they differ.
        """
        at = self.user.at
        here = self.fn(*at)
        pull = pullback(self.fn, at) if "reverse" in self.modes else None
        for _ in range(directions):
            direction = self._determined(direction_at(at, generator), here, pull)
            line = Line(self.model, at, direction)
            forward = self._forward(direction)
            if forward is not None:
                self._check_forward(line, here, forward)
            if pull is None:
                continue
            if forward is not None and bool((steep := self._steep(line, forward)).any()):
                # An infinite slope, as of a root at zero, is left out as an infinite value is.
                parts = steep.split([x.numel() for x in here])
                pairs = zip(here, parts, strict=True)
                here = tuple(x.masked_fill(p.view(x.shape).to(x.device), torch.inf) for x, p in pairs)
                direction = self._determined(direction, here, pull)
                line, forward = Line(self.model, at, direction), pushed(self.fn, at, direction)
            cotangents = where_finite(here, random_like(here, generator))
            gradients = pull(cotangents)
            if self.order == 1 and len(at) > 1:
                self._check_some(cotangents, gradients, generator)
            pulled = along(gradients, direction)
            if forward is not None:
                self._check_product(line, cotangents, where_finite(here, forward), pulled)
            else:
                self._check_sum(line, here, cotangents, pulled)
        return OrderReport(
            self.order,
            "forward" in self.modes and not self.no_forward,
            pull is not None,
            self.no_forward,
            len(self.kinked),
            unknown=len(self.unknown),
        )

    def _steep(self, line: Line, forward: Vector) -> torch.Tensor:
        """Where the derivative is infinite, and differences grow however small the step."""
        infinite = joined(forward).isinf()
        if not bool(infinite.any()):
            return infinite
        wide, narrow = (line.central(step)[0].abs() for step in (2.0**-30, 2.0**-40))
        return infinite & (~narrow.isfinite() | (narrow > 4 * wide))

    def _determined(
        self, direction: Vector, here: Vector, pull: Callable[[Vector], Vector] | None
    ) -> Vector:
        """The direction, zero where the gradient is NaN: the zero cotangent of an infinite result."""
        if pull is None or bool(joined(here).isfinite().all()):
            return direction
        gradients = pull(where_finite(here, tuple(map(torch.ones_like, here))))
        return tuple(torch.where(g.isnan(), 0, v) for g, v in zip(gradients, direction, strict=True))

    def _forward(self, direction: Vector) -> Vector | None:
        if "forward" not in self.modes or self.no_forward:
            return None
        try:
            return pushed(self.fn, self.user.at, direction)
        except RuntimeError as error:
            # Some kernels of torch write to the zeros of its forward mode, which has none of them.
            if not isinstance(error, NotImplementedError) and "ZeroTensors" not in str(error):
                raise
            if "reverse" not in self.modes:
                raise NotImplementedError(
                    f"check_derivatives: fn has no forward mode of order {self.order}, and "
                    f"modes={list(self.modes)} compares nothing else: {_first_line(error)} Leave modes "
                    "out, or write the jvp of the autograd.Function."
                ) from error
            self.no_forward = _first_line(error)
            return None

    # -- forward mode beside finite differences ---------------------------------------------------

    def _check_forward(self, line: Line, here: Vector, forward: Vector) -> None:
        known, tangent = joined(here).isfinite(), joined(forward)
        doubtful = known & ~self._close(line, tangent)
        if not bool(doubtful.any()):
            return
        self._check_comparable()
        estimate = line.estimate()
        if bool(known.any()) and not bool((known & estimate.value.isfinite()).any()):
            raise self._failure(self._unknown(int(known.sum())))
        self._note_kinks(estimate, known)
        self.unknown.update(_places(doubtful & ~estimate.known & ~estimate.kink))
        at, direction = line.at, line.direction

        def push(*xs: torch.Tensor) -> Vector:
            return pushed(self.fn, xs, direction)

        noise = Noise(push, at).at(*at, runs=_RUNS)
        excess = torch.where(doubtful, estimate.excess(tangent, noise), 0.0)
        if float(excess.max()) <= 1:
            return
        inside = self._jumps(at) | self._of_kinks(push, line, tangent, estimate, noise)
        self.kinked.update(_places(inside & (excess > 1)))
        excess = torch.where(inside, 0.0, excess)
        if float(excess.max()) <= 1:
            return
        i = int(excess.argmax())
        away, bound = estimate.away(tangent)[i], estimate.bound(noise)[i]
        raise self._failure(
            f"forward mode of order {self.order} is wrong at {self._place(i, here)}: "
            f"{_number(tangent[i])}, and finite differences are {_number(estimate.value[i])}"
            f"{_off(float(away), float(bound))}"
        )

    def _close(self, line: Line, tangent: torch.Tensor) -> torch.Tensor:
        """Where simple differences agree to enough digits that no careful ones are needed."""
        near = _CLOSE * tangent.abs()
        value, outer = line.central(_FIRST_STEP)
        close = (value - tangent).abs() <= near
        if not self.kinks:
            bent = (outer - 2 * line(0.0)).abs() / _FIRST_STEP
            close &= bent <= _STRAIGHT * tangent.abs()
        elif not bool(close.all()):
            close |= (line.extrapolated(_SECOND_STEP) - tangent).abs() <= near
        return close

    # -- kinks ------------------------------------------------------------------------------------

    def _of_kinks(
        self,
        derivative: Fn,
        line: Line,
        given: torch.Tensor,
        estimate: Estimate,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        """Where a derivative and its differences are among those that nudged values have.

        At a kink of a value on the way, torch takes one of its derivatives; together they may be none of
        the function's, as in relu(x) - relu(-x) at 0.
        """
        if not self.kinks:
            return torch.zeros_like(estimate.jump)
        mean, radius = nudged(derivative, line.at)
        room = _AROUND * radius
        beside = (estimate.value - mean).abs() <= room + estimate.spread + estimate.bound(noise)
        return ((given - mean).abs() <= room) & beside

    def _jumps(self, at: Vector) -> torch.Tensor:
        """Where the function's own values are at a jump, by which nudges do not count."""
        (_, small), (mean, large) = (nudged(self.model, at, size) for size in _NUDGED)
        if not self.kinks or not mean.numel():
            return torch.zeros_like(small, dtype=torch.bool)
        # Zeros are nudged by the same amount, whatever the size.
        scale = max(float(mean.abs().max()), _CLOSE_SUM)
        return (small > large / _STEEP) & (small > _CLOSE_SUM * scale)

    def _note_kinks(self, estimate: Estimate, known: torch.Tensor) -> None:
        found = _places(estimate.kink & known)
        self.kinked.update(found)
        if self.kinks or not found:
            return
        i = found[0]
        if estimate.jump[i]:
            what = "a jump: its values on both sides differ, however small the step"
        else:
            sides = (estimate.value[i] - estimate.spread[i], estimate.value[i] + estimate.spread[i])
            what = f"a kink: its derivatives on both sides are {' and '.join(map(_number, sides))}"
        here = self.model(*self.user.at)
        raise self._failure(
            f"at {self._place(i, here)} is {what}, so that there is no derivative of order "
            f"{self.order} to compare. Use arguments near it, or allow kinks with kinks=True"
        )

    # -- reverse mode beside forward mode, or beside finite differences ---------------------------

    def _check_product(
        self, line: Line, cotangents: Vector, forward: Vector, pulled: torch.Tensor
    ) -> None:
        pushed_, direction, at = inner(cotangents, forward), line.direction, line.at
        scale = inner(_absolute(cotangents), _absolute(forward))
        away = float((pulled - pushed_).abs())
        if away <= _CLOSE_PRODUCT * float(scale):
            return

        def both(*xs: torch.Tensor) -> Vector:
            here = along(pushed(self.fn, xs, direction), cotangents)
            return here, along(pullback(self.fn, xs)(cotangents), direction)

        bound = _OVER_NOISE * float(Noise(both, at).at(*at, runs=_RUNS).sum())
        if away <= bound <= _CLOSE * float(scale):
            return
        self._check_comparable()
        smooth = self._smooth(line, cotangents) if self.kinks else cotangents
        if any(bool((c != s).any()) for c, s in zip(cotangents, smooth, strict=True)):
            # At a kink each mode may take another derivative from between the sides, and roundings move
            # the products from one side to the other.
            there = along(pullback(self.fn, at)(smooth), direction)
            self._check_product(line, smooth, forward, there)
            if away > bound:
                self._check_sum(line, self.fn(*at), cotangents, pulled)
            return
        if away <= bound or self._products_of_kinks(both, at, pushed_, pulled):
            return
        raise self._failure(
            f"either reverse mode or forward mode of order {self.order} is wrong: <c, J v> is "
            f"{float(pushed_):.10g}, <J' c, v> is {float(pulled):.10g}, for random v and "
            f"c{_off(away, bound)}"
        )

    def _check_some(
        self, cotangents: Vector, gradients: Vector, generator: torch.Generator
    ) -> None:
        """Gradients are the same where some arguments require none."""
        for some in _choices(len(gradients), generator):
            found = in_some(self.fn, self.user.at, some, cotangents)
            if found is None:
                return
            places = [i for i, s in enumerate(some) if s]
            for i, gradient in zip(places, found, strict=True):
                self._check_alike(gradient, gradients[i], i, places)

    def _check_alike(
        self, gradient: torch.Tensor, among_all: torch.Tensor, i: int, places: list[int]
    ) -> None:
        apart = (gradient - among_all).abs().nan_to_num(nan=0.0)
        scale = among_all.abs().nan_to_num(posinf=0.0)
        if apart.numel() and float(apart.max()) > _CLOSE * float(scale.max()):
            self._check_comparable()
            names = " and ".join(self.user.paths[j] for j in places)
            raise self._failure(
                f"reverse mode of order 1 is wrong if only {names} requires gradients: the gradient of "
                f"{self.user.paths[i]} is off by {float(apart.max()):.2e} from the gradient if all "
                "arguments do. Check how the backward uses ctx.needs_input_grad"
            )

    def _products_of_kinks(self, both: Fn, at: Vector, *products: torch.Tensor) -> bool:
        """Whether both products are among those that nudged values have."""
        if not self.kinks:
            return False
        mean, radius = nudged(both, at)
        within = (joined(products) - mean).abs() <= _AROUND * radius
        near = (mean[0] - mean[1]).abs() <= _AROUND * radius.sum()
        found = bool(within.all() & near)
        self.inside |= found
        return found

    def _smooth(self, line: Line, cotangents: Vector) -> Vector:
        """Cotangents that are zero where the function has a kink or a jump, or no differences tell."""
        estimate = line.estimate()
        here = self.fn(*line.at)
        finite = joined(here).isfinite()
        self._note_kinks(estimate, finite)
        self.unknown.update(_places(finite & ~estimate.known & ~estimate.kink))
        inside = self._jumps(line.at) & finite
        self.kinked.update(_places(inside))
        rough = inside | estimate.kink | ~estimate.known
        kinks = rough.split([x.numel() for x in here])
        return tuple(
            c.masked_fill(kink.view(c.shape).to(c.device), 0)
            for c, kink in zip(cotangents, kinks, strict=True)
        )

    def _check_sum(
        self, line: Line, here: Vector, cotangents: Vector, pulled: torch.Tensor
    ) -> None:
        """Only reverse mode: its product with a direction against differences of <c, f>."""
        finite, weights = joined(here).isfinite(), joined(cotangents)
        given = pulled.detach().reshape(1).cpu()
        if self.kinks:
            slopes = torch.where(finite, line.extrapolated(_SECOND_STEP), 0.0)
            terms = (weights.conj() * slopes).real
            if abs(float(terms.sum() - given)) <= _CLOSE_SUM * float(terms.abs().sum()):
                return
        self._check_comparable()
        estimate = self._of_sum(line, here, cotangents)
        if not bool(estimate.value.isfinite()):
            raise self._failure(self._unknown(int(finite.sum())))
        at, direction = line.at, line.direction

        def pull(*xs: torch.Tensor) -> Vector:
            return (along(pullback(self.fn, xs)(cotangents), direction),)

        noise = Noise(pull, at).at(*at, runs=_RUNS)
        off = float(estimate.excess(given, noise)) > 1
        if self.kinks and (off or bool(estimate.kink) or not bool(estimate.known)):
            # A kink must not hide what is wrong elsewhere.
            smooth = self._smooth(line, cotangents)
            if any(bool((c != s).any()) for c, s in zip(cotangents, smooth, strict=True)):
                there = along(pullback(self.fn, at)(smooth), direction)
                self._check_sum(line, here, smooth, there)
                off &= not bool((self._jumps(at) & (weights != 0)).any())
        if not off:
            return
        if bool(self._of_kinks(pull, line, given, estimate, noise)):
            self.inside = True
            return
        raise self._failure(
            f"reverse mode of order {self.order} is wrong: <J' c, v> is {float(given):.10g}, and finite "
            f"differences of <c, f> along v are {float(estimate.value):.10g}"
            f"{_off(float(estimate.away(given)), float(estimate.bound(noise)))}"
        )

    def _of_sum(self, line: Line, here: Vector, cotangents: Vector) -> Estimate:
        """The estimate for <c, f>. At kinks, each term may have any derivative between its sides."""
        weights = joined(cotangents).abs()
        whole, weighed = line.estimate(), joined(here).isfinite() & (weights > 0)
        if bool((whole.kink & weighed).any()):
            terms = (joined(cotangents).conj() * torch.where(weighed, whole.value, 0.0)).real
            parts = (torch.where(weighed, x, 0.0) * weights for x in (whole.spread, whole.error))
            spread, error = (part.sum().reshape(1) for part in parts)
            jump = (whole.jump & weighed).any().reshape(1)
            return Estimate(terms.sum().reshape(1), spread, error, jump)

        def product(*xs: torch.Tensor) -> Vector:
            return (inner(cotangents, where_finite(here, self.model(*xs))),)

        return Line(product, line.at, line.direction).estimate()

    # -- messages ---------------------------------------------------------------------------------

    def _check_comparable(self) -> None:
        """Refuse what has no differences to compare: random functions, and those of narrower dtypes."""
        first, second = (joined(self.model(*self.user.at)) for _ in range(2))
        apart = (first - second).abs().nan_to_num(nan=0.0, posinf=0.0)
        scale = first.abs().nan_to_num(nan=0.0, posinf=0.0)
        if bool((apart > _CLOSE_SUM * scale.amax()).any()):
            raise AssertionError(
                "fn is random: two calls with the same arguments differ, so that it has no "
                "derivatives. Draw from torch's global generator, which each call finds in the same "
                "state, or pass the random values as an argument"
            )
        check_double("check_derivatives", self.user.original, self.user.args)

    def _failure(self, what: str) -> AssertionError:
        """The error to raise for everything wrong; a line of the user's code may be added."""
        return AssertionError(what)

    def _unknown(self, count: int) -> str:
        what = "<c, f>" if self.modes == ("reverse",) else self._name(0)
        return (
            f"order {self.order} cannot be checked: near the given arguments {what} is infinite or "
            f"NaN, so that none of its {count} finite elements has a finite difference; give arguments "
            "from inside of the function's domain"
        )

    def _name(self, result: int) -> str:
        if self.order == 1:
            return f"result {result}"
        return f"the gradient of {self.user.paths[result]}"

    def _place(self, i: int, vector: Vector) -> str:
        """An element of a row, as the index of one of the tensors in it."""
        for number, x in enumerate(vector):
            if i < x.numel():
                at = [int(n) for n in torch.unravel_index(torch.tensor(i), tuple(x.shape))]
                return f"{at} of {self._name(number)}"
            i -= x.numel()
        raise IndexError(i)


def _places(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def _choices(count: int, generator: torch.Generator) -> list[list[bool]]:
    """Which arguments require gradients: all choices but all and none of few, some of many."""
    if count <= _FEW:
        return [[n >> i & 1 == 1 for i in range(count)] for n in range(1, 2**count - 1)]
    some = (torch.rand(count, generator=generator) < 0.5).tolist()
    some[int(torch.randint(count, (), generator=generator))] = True
    return [] if all(some) else [some]


def _absolute(vector: Vector) -> Vector:
    return tuple(x.abs() for x in vector)


def _off(difference: float, bound: float) -> str:
    times = abs(difference) / bound if bound else torch.inf
    return f"; they are {abs(difference):.2e} apart, {times:.3g} times the bound of {bound:.1e}"


def _number(x: torch.Tensor) -> str:
    return f"{complex(x):.8g}" if x.is_complex() else f"{float(x):.8g}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
