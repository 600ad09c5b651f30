"""check_pure: calls of a function give equal results, and change nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchard.functional.core import tree
from torchard.functional.core.arguments import checked
from torchard.functional.trace import trace
from torchard.testing.calls import as_tensors, leaving_buffers, watched
from torchard.testing.rounding.roundings import alike
from torchard.testing.surroundings import Surroundings

__all__ = ["Purity", "check_pure"]


@dataclass(frozen=True)
class Purity:
    """The findings of `check_pure` about a pure function.

    Attributes:
        traceable: whether torchard's transforms can trace it for these arguments.
        reason: why it cannot: the line, and what to write instead.

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


@leaving_buffers
@checked
def check_pure(fn: Callable[..., Any], *args: Any) -> Purity:
    """Assert that a function is pure: equal results for equal arguments, and nothing else changes.

    "Nothing else" includes the arguments, torch's global generator, and everything to which the
    function's code refers: variables that it closes over, globals that it names, attributes of its
    object, and all that these hold, including the values of tensors. The internal state of C libraries is
    not seen. Buffers of modules that the call changes are restored.

    Args:
        fn: a function of pytrees, or a module.
        args: its arguments.

    Returns:
        Whether the function can also be traced, and if not, why: a branch on a value is pure.

    Raises:
        AssertionError: two calls differ, something was changed, or torch's global generator was read; the
            message says which.

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
    AssertionError: the function draws from torch's global random state: switch a module's dropout ...
    """
    before, around, settings = tree.map(_copied, args), Surroundings(fn), _settings()
    gradients = _gradients(args)
    first = _undrawn(fn, args)
    _check_same(args, before, "args", "was changed by the call")
    for path, value in _gradients(args).items():
        if not _is_same(value, gradients[path]):
            raise AssertionError(f"{path} was changed by the call")
    _check_unchanged(around)
    for name, value in _settings().items():
        if value != settings[name]:
            raise AssertionError(f"the call changes {name}")
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
    result, draws = watched(fn, args)
    if not draws:
        return result
    raise AssertionError(
        "the function draws from torch's global random state: switch a module's dropout off by "
        "module.eval(), or draw from an argument: from a seed, by "
        "generator=torch.Generator().manual_seed(seed), or from a key of torchard.random"
    )


def _check_unchanged(around: Surroundings) -> None:
    if (change := around.change()) is not None:
        raise AssertionError(f"the call changes {change}")


def _settings() -> dict[str, Any]:
    """Other state that a call may change for all other calls."""
    kind, keys, *rest = np.random.get_state()
    return {
        "the state of Python's random": random.getstate(),
        "the state of NumPy's random": (kind, np.asarray(keys).tobytes(), *rest),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch's precision of products": torch.get_float32_matmul_precision(),
    }


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _gradients(args: Any) -> dict[str, Any]:
    """The properties of each tensor among the arguments besides its values."""
    leaves = zip(tree.paths(args, "args"), tree.leaves(args), strict=True)
    tensors = [(path, x) for path, x in leaves if isinstance(x, torch.Tensor)]
    flags = {f"{path}.requires_grad": x.requires_grad for path, x in tensors}
    kept = {f"{path}.grad": _copied(x.grad) for path, x in tensors if x.is_leaf}
    return {**flags, **kept}


def _check_same(have: Any, want: Any, root: str, what: str) -> None:
    """Leaves are equal, a NaN only to a NaN."""
    paths, leaves = tree.paths(want, root), tree.leaves(want)
    if tree.paths(have, root) != paths:
        raise AssertionError(f"{root} {what}: it has other leaves")
    for path, a, b in zip(paths, tree.leaves(have), leaves, strict=True):
        if not _is_same(a, b):
            raise AssertionError(f"{path} {what}")


def _is_same(a: Any, b: Any) -> bool:
    a, b = as_tensors(a), as_tensors(b)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return False
        return bool(np.all(a == b)) or bool(np.all(a != a) and np.all(b != b))
    kinds = [(x.shape, x.dtype, x.device, x.layout) for x in (a, b)]
    return kinds[0] == kinds[1] and bool(alike(a.detach(), b.detach()).all())
