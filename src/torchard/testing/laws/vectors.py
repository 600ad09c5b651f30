"""A function of pytrees as one of the floating tensors in them, called with the same random draws."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.tensor_spec import is_inexact
from torchard.testing.derived import as_primal
from torchard.testing.laws.converted import check_converted
from torchard.testing.laws.modes import Fn, Vector
from torchard.testing.rounding.in_double import as_double

__all__ = ["OfVectors", "direction_at", "flattened", "random_like", "same_draws", "where_finite"]

_WHO = "check_derivatives"


@dataclass(frozen=True)
class OfVectors:
    """A function from its floating leaves to its floating results, each call with the same draws.

    Attributes:
        fn: a function of these leaves.
        at: the leaves, in float64.
        paths: the paths of the leaves.
        original: the function of pytrees, and `args`, its arguments in float64.
    """

    fn: Fn
    at: Vector
    paths: list[str]
    original: Callable[..., Any]
    args: tuple[Any, ...]


@contextlib.contextmanager
def same_draws(args: Any, seed: int) -> Iterator[None]:
    """Runs a block with torch's generators at this seed, and restores them."""
    tensors = [x for x in tree.leaves(args) if isinstance(x, torch.Tensor)]
    devices = {x.device.index for x in tensors if x.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.inference_mode(False):
        _seed_for(tensors, seed)
        yield


def _seed_for(tensors: Iterable[torch.Tensor], seed: int) -> None:
    if all(x.device.type == "cpu" for x in tensors):
        torch.default_generator.manual_seed(seed)  # a hundredth of the time of all generators
    else:
        torch.manual_seed(seed)


def flattened(fn: Callable[..., Any], args: tuple[Any, ...], seed: int) -> OfVectors:
    """fn as a function of the floating leaves of its arguments, in float64.

    Raises:
        ValueError: no argument, or no result, is a floating tensor.
        TypeError: fn does not take float64.
    """
    doubles = tree.map(as_double, tree.whole(args))
    floats, rest = tree.partition(doubles)
    leaves, structure = tree.flatten(floats)
    if not leaves:
        raise ValueError(f"{_WHO}: no argument has a floating tensor to differentiate in")
    before = torch.get_rng_state()
    try:
        result = tree.leaves(tree.whole(fn(*tree.map(_copied, doubles))))
    except Exception:
        check_converted(_WHO, fn, args, doubles, torch.float64)
        raise
    if not any(map(is_inexact, result)):
        kinds = sorted({str(getattr(r, "dtype", type(r).__name__)) for r in result})
        raise ValueError(
            f"{_WHO}: no result of fn is a floating tensor to differentiate: it returns "
            f"{', '.join(kinds) or 'nothing'}. Return the value before it is rounded or compared, or "
            "declare the function whose derivatives it has as straight_through="
        )
    draws = not torch.equal(before, torch.get_rng_state())

    def flat(*some: torch.Tensor) -> Vector:
        if draws:
            _seed_for(some, seed)
        # Copies, since fn may write to them.
        given = tree.unflatten(structure, [x.clone() for x in some])
        result = fn(*tree.combine(given, rest))
        return tuple(r for r in tree.leaves(tree.whole(result)) if is_inexact(r))

    return OfVectors(flat, tuple(map(as_primal, leaves)), tree.paths(floats, "args"), fn, doubles)


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x


def direction_at(at: Vector, generator: torch.Generator) -> Vector:
    """A random direction: of magnitudes of 3/4 to 3/2, times those of entries that are larger than 1.

    With none near zero, each entry has its part in what is compared; in proportion to large entries,
    steps are not lost in their rounding.
    """
    return tuple(
        v * x.detach().abs().clamp(min=1).where(x.isfinite(), 1.0)
        for x, v in zip(at, random_like(at, generator), strict=True)
    )


def random_like(vector: Vector, generator: torch.Generator) -> Vector:
    """Random entries of both signs, of magnitudes of 3/4 to 3/2."""
    return tuple(_random(x, generator) for x in vector)


def _random(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shape = (*x.shape, 2) if x.is_complex() else x.shape
    u = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    v = (1.5 * u).add_(u.sign(), alpha=0.75)
    return (torch.view_as_complex(v) if x.is_complex() else v).to(x.device, x.dtype)


def where_finite(here: Vector, values: Vector) -> Vector:
    """Values, but zero at elements that are infinite or NaN here: these have no derivative."""
    return tuple(torch.where(x.isfinite(), y, 0) for x, y in zip(here, values, strict=True))
