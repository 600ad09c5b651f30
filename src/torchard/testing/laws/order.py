"""Monotone functions: larger arguments give no smaller results."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import AtLeast
from torchard.functional.core.tensor_spec import is_inexact
from torchard.testing.calls import law
from torchard.testing.laws.sides import check_floats
from torchard.testing.report import Trials
from torchard.testing.rounding.bounds import expected
from torchard.testing.rounding.programs import program_of

__all__ = ["monotone"]

# The steps by which arguments grow, in units of 1 plus their size.
_STEPS = (1e-3, 0.1, 1.0, 10.0)
# Steps of a single element, for about half of them: else rising terms hide a term that falls.
_SINGLES = 4
# Elements among which those are that rise least.
_STEEPEST = 8


@law
def monotone(
    fn: Callable[..., Any],
    *args: Any,
    increasing: bool = True,
    draws: Annotated[int, AtLeast(1)] = 4,
    seed: int = 0,
) -> Trials:
    """Assert that no element of a result gets smaller when elements of the arguments get larger.

    Arguments grow by steps of four sizes, in a random half of their elements and in single elements: the
    elements for which the gradient of the sum of all results is smallest, and random ones. Rounding may
    make a result smaller by at most its bound, which is measured as in `equal`.

    Args:
        fn: a function of pytrees with real results: an activation, a distribution function, a sum.
        args: its arguments; floating tensors grow.
        increasing: false for functions whose results must not get larger.
        draws: the number of steps of each size in half of the elements, and in four single elements.
        seed: the seed of the steps.

    Returns:
        The number and the kinds of steps that were tried; print it.

    Raises:
        AssertionError: a result goes the other way; the message names the result, the step, the change
            and the change that rounding explains.
        ValueError: no argument has a floating tensor, or a result is complex.

    >>> import torch
    >>> from torchard.testing import monotone
    >>> x = torch.tensor([-2.0, -1.0, 0.5])
    >>> print(monotone(torch.sigmoid, x))
    80 steps of 3 elements, by up to 0.001, 0.1, 1 and 10 of one plus their size: no result falls
    >>> monotone(torch.nn.functional.silu, x)
    Traceback (most recent call last):
        ...
    AssertionError: not increasing: out[0] falls by ...
    """
    check_floats("monotone", args)
    start, generator = _Call(fn, args, seed), torch.Generator().manual_seed(seed)
    counts = [x.numel() if _grows(x) else 0 for x in tree.leaves(args)]
    singles = _places(fn, args, increasing, torch.randperm(sum(counts), generator=generator))
    for size in _STEPS:
        for _ in range(draws):
            chosen = torch.rand(sum(counts), generator=generator, dtype=torch.float64)
            steps = [chosen.masked_fill(chosen < 0.5, 0.0)]
            steps += [_single(next(singles), sum(counts)) for _ in range(_SINGLES)]
            for step in steps:
                parts = iter((size * step).split(counts))
                more = tree.map(lambda x, parts=parts: _grown(x, next(parts)), args)
                _check(start, _Call(fn, more, seed), increasing, size)
    *sizes, last = (f"{size:g}" for size in _STEPS)
    return Trials(
        len(_STEPS) * draws * (1 + _SINGLES),
        f"steps of {sum(counts)} elements, by up to {', '.join(sizes)} and {last} of one plus "
        f"their size: no result {'falls' if increasing else 'rises'}",
    )


class _Call:
    """Real results of one call by path, and their bounds, which are measured on demand."""

    def __init__(self, fn: Callable[..., Any], args: Any, seed: int) -> None:
        self.fn, self.args, self.seed = fn, args, seed
        result = tree.whole(fn(*args))
        pairs = zip(tree.paths(result, "out"), tree.leaves(result), strict=True)
        tensors = {path: x.detach().cpu() for path, x in pairs if isinstance(x, torch.Tensor)}
        for path, x in tensors.items():
            if x.is_complex():
                raise ValueError(f"monotone: {path} is complex, and complex numbers have no order.")
        self.values = {path: x.double() for path, x in tensors.items()}

    @functools.cached_property
    def bounds(self) -> dict[str, torch.Tensor]:
        """The distance by which roundings may move each result."""
        program, inputs = program_of(self.fn, tree.whole(self.args))
        known = expected(program, inputs, program.results, seed=self.seed)
        bounds = [known[node].bound for node in program.results]
        return {
            path: torch.zeros_like(value) if bound is None else bound.cpu()
            for (path, value), bound in zip(self.values.items(), bounds, strict=True)
        }


def _check(start: _Call, end: _Call, increasing: bool, size: float) -> None:
    for path, before in start.values.items():
        after = end.values[path]
        lost = torch.where(before == after, 0.0, (before - after) * (1 if increasing else -1))
        parted = before.isnan() != after.isnan()
        if not bool(((lost > 0) | parted).any()):
            continue
        bound = start.bounds[path] + end.bounds[path]
        wrong = (lost > bound) | parted
        if not bool(wrong.any()):
            continue
        excess = (lost - bound).nan_to_num(nan=torch.inf)
        place = int(torch.where(wrong, excess, -torch.inf).argmax())
        at = [int(i) for i in torch.unravel_index(torch.tensor(place), before.shape)]
        name = "increasing: {} falls" if increasing else "decreasing: {} rises"
        raise AssertionError(
            f"not {name.format(path + (str(at) if at else ''))} by {float(lost.flatten()[place]):.3g} "
            f"from {float(before.flatten()[place]):.6g} when arguments grow by up to {size:g} of one "
            f"plus their size; rounding explains {float(bound.flatten()[place]):.3g}"
        )


def _places(
    fn: Callable[..., Any], args: Any, increasing: bool, order: torch.Tensor
) -> Iterator[int]:
    """Single elements to step by, endlessly: alternately at random and by their gradients."""
    places = order.tolist()
    try:
        leaves, structure = tree.flatten(args)
        graded = [x.detach().clone().requires_grad_() if _grows(x) else x for x in leaves]
        with torch.enable_grad():
            results = tree.leaves(tree.whole(fn(*tree.unflatten(structure, graded))))
            total = sum(r.double().sum() for r in results if _grows(r) and r.requires_grad)
        varied = [x for x in graded if _grows(x)]
        found = torch.autograd.grad(total, varied, allow_unused=True, materialize_grads=True)
        slopes = torch.cat([g.flatten().cpu().double() for g in found])
        first = slopes.argsort(descending=not increasing)[:_STEEPEST].tolist()
    except Exception:  # whatever fn has no gradient for: a random order is one, too
        first = places
    pairs = zip(itertools.cycle(first), itertools.cycle(places), strict=False)
    return itertools.chain.from_iterable(pairs)


def _single(place: int, count: int) -> torch.Tensor:
    step = torch.zeros(count, dtype=torch.float64)
    step[place] = 1.0
    return step


def _grows(x: Any) -> bool:
    return is_inexact(x) and not x.is_complex()


def _grown(x: Any, step: torch.Tensor) -> Any:
    """A tensor with elements larger by steps in units of one plus their size."""
    if not _grows(x):
        return x
    return x + (1 + x.detach().abs()) * step.reshape(x.shape).to(x.device, x.dtype)
