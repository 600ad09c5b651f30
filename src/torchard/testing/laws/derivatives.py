"""check_derivatives: forward mode, reverse mode and finite differences agree, to any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch

from torchard.functional.core.arguments import AtLeast, checked
from torchard.testing.calls import leaving_buffers, with_parameters
from torchard.testing.derived import lack
from torchard.testing.laws.derivative_levels import Level
from torchard.testing.laws.vectors import OfVectors, direction_at, flattened, same_draws
from torchard.testing.report import DerivativeReport, OrderReport
from torchard.testing.wrong_rules import wrong_rules

__all__ = ["check_derivatives"]

# The distance from a kink at which derivatives are compared too, for entries of about 1.
_BESIDE = 2.0**-7


@leaving_buffers
@checked
def check_derivatives(
    fn: Callable[..., Any],
    *args: Any,
    order: Annotated[int, AtLeast(1)] = 2,
    modes: Sequence[str] = ("forward", "reverse"),
    directions: Annotated[int, AtLeast(1)] = 3,
    kinks: bool = True,
    straight_through: Callable[..., Any] | None = None,
    seed: int = 0,
) -> DerivativeReport:
    """Assert that a function's derivatives are right, in float64 along random directions.

    Forward mode is compared with finite differences, reverse mode with forward mode by inner products:
    <c, J v> = <J' c, v>. Each further order does the same to the gradient. Derivatives that agree to
    seven digits are accepted. For the others, each element's finite difference is taken with the step
    that is best for it. Its bound follows from the rounding errors of the function and its derivatives,
    which are measured by runs in which each operation is perturbed by as much as it rounds.

    A function without forward mode is compared only in reverse mode, as the report states. A function
    that draws from torch's global generator is called with the same draws each time. Higher orders for
    which torch has no derivative are skipped, as the report states.

    Args:
        fn: a function of pytrees, or a module, whose parameters count as arguments.
        args: its arguments. Floating tensors are converted to float64.
        order: up to which order derivatives are checked.
        modes: "forward", "reverse" or both; "reverse" by itself is compared with finite differences.
        directions: how many directions are drawn.
        kinks: whether fn may have kinks and jumps at these arguments. At a kink, where the differences
            from the left and from the right do not meet, the derivative must lie between them; at a jump
            none is compared. If kinks meet inside of fn, it must be near the derivatives that fn has if
            its intermediate values are nudged. Derivatives at a kink are also compared at nearby
            arguments, and counted in the report. With False, each is a failure.
        straight_through: the function whose derivatives fn is designed to have, if they are not its own:
            the identity for a rounding with a straight-through estimator. It takes fn's arguments and
            returns results of the same shapes; finite differences are taken of it.
        seed: the seed of the directions, and of fn's random draws.

    Returns:
        What was compared, a line for each order; print it.

    Raises:
        AssertionError: a derivative is wrong; the message has its order and mode, its place and correct
            value. Or fn is random: two calls with the same arguments differ.
        TypeError: the function takes its arguments, but not in float64, or it computes in less than that.
        ValueError: no argument or no result is a floating tensor.
        NotImplementedError: fn has no forward mode, and only that is to be compared.

    Source: the dot-product test of adjoints, Griewank, Walther, Evaluating Derivatives, 2008, section 3;
    ``torch.autograd.gradcheck`` and ``jax.test_util.check_grads`` for the two modes; Ridders, "Accurate
    computation of F'(x) and F'(x)F''(x)", Adv. Eng. Software 4 (1982), for errors by neighbouring steps;
    Bengio, Léonard, Courville, arXiv:1308.3432, for straight-through estimators.

    >>> import torch
    >>> from torchard.testing import check_derivatives
    >>> print(check_derivatives(torch.nn.functional.gelu, torch.tensor([-1.0, 0.0, 2.0])))
    order 1: forward mode against finite differences, reverse mode against forward mode
    order 2: forward mode against finite differences, reverse mode against forward mode
    >>> class Cube(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         ctx.save_for_backward(x)
    ...         return x ** 3
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         return g * 2 * ctx.saved_tensors[0] ** 2
    >>> check_derivatives(Cube.apply, torch.tensor([1.0, 2.0]), order=1)
    Traceback (most recent call last):
        ...
    AssertionError: reverse mode of order 1 is wrong: ...
    """
    unknown = set(modes) - {"forward", "reverse"}
    if unknown or not modes:
        raise ValueError(f"modes is {list(modes)!r}; it lists 'forward', 'reverse' or both")
    generator = torch.Generator().manual_seed(seed)
    if isinstance(fn, torch.nn.Module):
        fn, _, args = with_parameters(fn, fn, args)
    with same_draws(args, seed):
        user = flattened(fn, args, seed)
        model = user.fn if straight_through is None else _surrogate(straight_through, args, seed, user)
        first = Level(user.fn, model, 1, tuple(modes), kinks, user)
        try:
            report, rough = _checked(first, order, directions, generator)
        except AssertionError as error:
            raise AssertionError(f"{error}{wrong_rules(user.original, user.args)}") from None
        if rough and (moved := _moved(user, generator)) is not None:
            _checked(replace(first, user=moved), order, directions, generator)
            report = DerivativeReport(replace(row, beside=not row.missing) for row in report)
    return report


def _checked(
    level: Level, order: int, directions: int, generator: torch.Generator
) -> tuple[DerivativeReport, bool]:
    """The comparisons up to an order, and whether kinks affected them."""
    report, rough = DerivativeReport([level.check(directions, generator)]), level.rough
    for _ in range(order - 1):
        try:
            level = level.next(generator)
            report.append(level.check(directions, generator))
        except RuntimeError as error:
            reason = lack(error)
            if reason is None or "reverse" not in level.modes:
                raise
            report.append(OrderReport(len(report) + 1, forward=False, reverse=False, missing=reason))
            break
        rough |= level.rough
    return report, rough


def _moved(user: OfVectors, generator: torch.Generator) -> OfVectors | None:
    """The function at nearby arguments without kinks; None if there are none.

    A kink hides an error in the same element, and integer values meet many kinks.
    """
    steps = direction_at(user.at, generator)
    moved = tuple(x + _BESIDE * v for x, v in zip(user.at, steps, strict=True))
    try:
        here, there = user.fn(*user.at), user.fn(*moved)
    except Exception:  # outside of fn's domain
        return None
    if [x.shape for x in here] != [y.shape for y in there] or any(
        bool((x.isfinite() & ~y.isfinite()).any()) for x, y in zip(here, there, strict=True)
    ):
        return None
    return replace(user, at=moved)


def _surrogate(
    fn: Callable[..., Any], args: tuple[Any, ...], seed: int, user: OfVectors
) -> Callable[..., Any]:
    """The declared function, whose results have the shapes of the user's."""
    model = flattened(fn, args, seed).fn
    shapes = [[list(x.shape) for x in f(*user.at)] for f in (user.fn, model)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"straight_through returns floating results of shapes {shapes[1]}, and fn of {shapes[0]}; "
            "give the function that has fn's derivatives, of the same arguments and results"
        )
    return model
