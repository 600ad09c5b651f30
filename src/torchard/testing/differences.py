"""The differences of a function's results from the expected ones, by path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchard.testing.report import Difference, Report
from torchard.testing.rounding.bounds import Expected

__all__ = ["Wanted", "differences_of", "kind_of"]

_ABSENT = object()


def kind_of(x: Any) -> torch.dtype | type:
    """The dtype of a tensor, or the type of any other value."""
    return x.dtype if isinstance(x, torch.Tensor) else type(x)


@dataclass(frozen=True)
class Wanted:
    """A tensor among expected results, and the dtype that it should have."""

    value: Expected
    dtype: torch.dtype


def differences_of(have: dict[str, Any], want: dict[str, Any]) -> Report:
    """A row for each result, by path; of what should be returned, tensors are `Wanted`."""
    return Report(
        _difference(path, have.get(path, _ABSENT), want.get(path, _ABSENT))
        for path in dict.fromkeys([*want, *have])
    )


def _difference(path: str, have: Any, want: Any) -> Difference:
    kind = kind_of(have)
    if problem := _misfit(have, want):
        return Difference(path, kind, problem=problem)
    if not isinstance(want, Wanted):
        return Difference(path, kind)
    excess = want.value.excess(have)
    if not excess.numel():
        return Difference(path, kind)
    place = int(excess.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), excess.shape))
    bound = 0.0 if want.value.bound is None else float(want.value.bound[at])
    problem = _not_finite(have[at], want.value.exact[at]) if excess[at] > 1 else ""
    return Difference(path, kind, want.value.error(have), bound, float(excess[at]), at, problem)


def _not_finite(have: torch.Tensor, want: torch.Tensor) -> str:
    """An element and its expected value, if one of the two is not finite."""
    if bool(have.isfinite()) and bool(want.isfinite()):
        return ""
    return f"{have.item():.6g}, reference {want.item():.6g}"


def _misfit(have: Any, want: Any) -> str:
    """Why two results cannot be equal, whatever the numbers in them are."""
    if have is _ABSENT or want is _ABSENT:
        return f"{'fn' if have is _ABSENT else 'the reference'} has no such result"
    if isinstance(have, torch.Tensor) and isinstance(want, Wanted):
        if have.shape != want.value.exact.shape:
            return f"shape {list(have.shape)}, reference {list(want.value.exact.shape)}"
        return "" if have.dtype == want.dtype else f"dtype, reference {want.dtype}"
    if isinstance(have, torch.Tensor) or isinstance(want, Wanted):
        other = "a tensor" if isinstance(want, Wanted) else f"a {type(want).__name__}"
        return f"a {type(have).__name__}, reference {other}"
    return "" if have is want else _unlike(have, want)


def _unlike(have: Any, want: Any) -> str:
    """How two values that are no tensors differ."""
    by_identity: Any = object.__eq__
    try:
        same = type(have) is type(want) and bool(have == want or (have != have and want != want))
        comparable = same or type(have).__eq__ is not by_identity
    except (TypeError, ValueError, RuntimeError):  # == gives no truth value
        same = comparable = False
    if not comparable and type(have) is type(want):
        return (
            f"a {type(have).__name__} cannot be compared: register it with torchard.tree.register, or "
            "return the tensors that are to be compared"
        )
    exact = ": numbers must be the same; of tensors, roundings count" if type(have) is float else ""
    return "" if same else f"{have!r}, reference {want!r}{exact}"
