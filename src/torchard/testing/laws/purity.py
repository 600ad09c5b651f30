"""check_pure: calls of a function give equal results, and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.trace import trace
from torchard.testing.calls import seeded
from torchard.testing.rounding.roundings import alike
from torchard.testing.surroundings import Surroundings

__all__ = ["Purity", "check_pure"]


@dataclass(frozen=True)
class Purity:
    """What `check_pure` found of a pure function.

    Attributes:
        traceable: whether torchard's transforms can trace it for these arguments.
        reason: why not: the line, and what to write instead.

    >>> import torch
    >>> from torchard.testing import Purity, check_pure
    >>> found = check_pure(torch.sin, torch.ones(3))
    >>> isinstance(found, Purity), found.traceable, str(found)
    (True, True, 'pure')
    """

    traceable: bool
    reason: str = ""

    def __str__(self) -> str:
        return "pure" if self.traceable else f"pure; cannot be traced, because {self.reason}"


@checked
def check_pure(fn: Callable[..., Any], *args: Any) -> Purity:
    """Assert that a function is pure: equal results for equal arguments, and nothing else changes.

    "Nothing else" are the arguments, torch's global generator, and what the function's code refers to:
    variables that it closes over, globals that it names, attributes of its object, with all that these
    hold, tensors' values included. What a library in C keeps to itself is not seen.

    Args:
        fn: a function of pytrees, or a module.
        args: its arguments.

    Returns:
        Whether the function can be traced too, and if not, why: a branch on a value is pure.

    Raises:
        AssertionError: two calls differ, something was changed, or torch's global generator was read;
            says what.

    >>> import torch
    >>> from torchard.testing import check_pure
    >>> print(check_pure(lambda x: x if x.sum() > 0 else -x, torch.ones(3)))
    pure; cannot be traced, because ...
    >>> seen = []
    >>> def remembers(x):
    ...     seen.append(x)
    ...     return x * 2
    >>> check_pure(remembers, torch.ones(3))
    Traceback (most recent call last):
        ...
    AssertionError: the call changes seen (a list of 1 item, before of none)
    >>> check_pure(torch.rand_like, torch.ones(3))
    Traceback (most recent call last):
        ...
    AssertionError: the function draws from torch's global random state; pass a key of torchard.random
    """
    before, around = tree.map(_copied, args), Surroundings(fn)
    first = _undrawn(fn, args)
    _check_same(args, before, "args", "was changed by the call")
    _check_unchanged(around)
    first = tree.map(_copied, first)  # which a second call may write to
    _check_same(fn(*args), first, "out", "differs between two calls with the same arguments")
    _check_unchanged(around)
    try:
        trace(fn)(*args)
    except Exception as error:  # whatever a trace refuses: the calls have shown that fn is pure
        return Purity(False, str(error))
    return Purity(True)


def _undrawn(fn: Callable[..., Any], args: Any) -> Any:
    """A call that must not draw from torch's global generator."""
    with seeded(0):
        state = torch.get_rng_state()
        result = fn(*args)
        if torch.equal(state, torch.get_rng_state()):
            return result
    raise AssertionError(
        "the function draws from torch's global random state; pass a key of torchard.random"
    )


def _check_unchanged(around: Surroundings) -> None:
    if (change := around.change()) is not None:
        raise AssertionError(f"the call changes {change}")


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _check_same(have: Any, want: Any, root: str, what: str) -> None:
    """Leaves are equal, a NaN only to a NaN."""
    for path, a, b in zip(
        tree.paths(want, root), tree.leaves(have), tree.leaves(want), strict=True
    ):
        same = bool(alike(a, b).all()) if isinstance(a, torch.Tensor) else a == b
        if not same:
            raise AssertionError(f"{path} {what}")
