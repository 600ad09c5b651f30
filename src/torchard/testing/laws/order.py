"""Monotone functions: larger arguments give no smaller results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import AtLeast
from torchard.testing.calls import as_function, law
from torchard.testing.laws.sides import check_floats
from torchard.testing.rounding.bounds import expected
from torchard.testing.rounding.programs import program_of
from torchard.testing.rounding.roundings import is_float

__all__ = ["monotone"]

# By how much arguments grow, in units of one plus their own size.
_STEPS = (1e-3, 0.1, 1.0, 10.0)


@law
def monotone(
    fn: Callable[..., Any],
    *args: Any,
    increasing: bool = True,
    draws: Annotated[int, AtLeast(1)] = 4,
    seed: int = 0,
) -> None:
    """Assert that no element of a result gets smaller when elements of the arguments get larger.

    Arguments grow in random elements, by steps of four sizes. Rounding may make a result smaller by its
    bounds, which are measured as those of `equal` are.

    Args:
        fn: a function of pytrees with real results: an activation, a distribution function, a sum.
        args: its arguments; floating tensors grow.
        increasing: false for functions whose results must not get larger.
        draws: how many steps of each size.
        seed: of the steps.

    Raises:
        AssertionError: a result goes the other way; names the result, the step, by how much and what
            rounding explains.
        ValueError: no argument has a floating tensor, or a result is complex.

    >>> import torch
    >>> from torchard.testing import monotone
    >>> x = torch.tensor([-2.0, -1.0, 0.5])
    >>> monotone(torch.sigmoid, x)
    >>> monotone(torch.nn.functional.silu, x)
    Traceback (most recent call last):
        ...
    AssertionError: not increasing: out[0] falls by ...
    """
    f = as_function(fn)
    check_floats("monotone", args)
    start, generator = _Values.of(f, args, seed), torch.Generator().manual_seed(seed)
    for size in _STEPS:
        for _ in range(draws):
            more = tree.map(lambda x, s=size: _grown(x, s, generator), args)
            end = _Values.of(f, more, seed)
            _check(start, end, increasing, size)


class _Values:
    """Real results of one call by path, with their bounds."""

    def __init__(self, found: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.found = found

    @classmethod
    def of(cls, fn: Callable[..., Any], args: Any, seed: int) -> _Values:
        result = tree.whole(fn(*args))
        program, inputs = program_of(fn, tree.whole(args))
        nodes = program.results
        known = expected(program, inputs, nodes, seed=seed)
        found = {}
        pairs = zip(tree.paths(result, "out"), tree.leaves(result), strict=True)
        tensors = [(path, x) for path, x in pairs if isinstance(x, torch.Tensor)]
        for (path, x), node in zip(tensors, nodes, strict=True):
            if x.is_complex():
                raise ValueError(f"monotone: {path} is complex, and complex numbers have no order.")
            bound = known[node].bound
            value = x.detach().double().cpu()
            found[path] = value, torch.zeros_like(value) if bound is None else bound
        return cls(found)


def _check(start: _Values, end: _Values, increasing: bool, size: float) -> None:
    for path, (before, bound) in start.found.items():
        after, other = end.found[path]
        lost = (before - after) * (1 if increasing else -1)
        excess = torch.where(before == after, 0.0, lost) - (bound + other)
        wrong = (excess > 0) | (before.isnan() != after.isnan())
        if not bool(wrong.any()):
            continue
        place = int(torch.where(wrong, excess.nan_to_num(nan=torch.inf), -torch.inf).argmax())
        at = [int(i) for i in torch.unravel_index(torch.tensor(place), before.shape)]
        name = "increasing: {} falls" if increasing else "decreasing: {} rises"
        explained = float((bound + other).flatten()[place])
        raise AssertionError(
            f"not {name.format(path + (str(at) if at else ''))} by {float(lost.flatten()[place]):.3g} "
            f"from {float(before.flatten()[place]):.6g} when arguments grow by up to {size:g} of one "
            f"plus their size; rounding explains {explained:.3g}"
        )


def _grown(x: Any, size: float, generator: torch.Generator) -> Any:
    """A tensor of which about half of the elements are larger."""
    if not is_float(x) or x.is_complex():
        return x
    kept = torch.rand(x.shape, generator=generator, dtype=torch.float64) < 0.5
    step = torch.rand(x.shape, generator=generator, dtype=torch.float64).masked_fill(kept, 0.0)
    return x + ((1 + x.detach().abs()) * (size * step).to(x.device, x.dtype)).to(x.dtype)
