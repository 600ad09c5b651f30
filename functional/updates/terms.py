"""Terms: the operations of a function, recorded once, to be found in a program."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from torchard.functional import torch_internals as internals

__all__ = ["Found", "RecordedTerm", "fits", "recorded_terms"]


@dataclass(eq=False)
class RecordedTerm:
    """An operation on terms and numbers; or, without an operator, anything.

    Attributes:
        wide: whether the recorded value has dims.
    """

    wide: bool
    op: Any = None
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


Found = dict[Any, Any]
"""What a program has in the place of terms, and of numbers, which have names."""


class _Recorder(internals.TorchDispatchMode):
    """Records operations; numbers that are not known to be tensors' are constants."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = list(tensors)  # by whose identity terms are found
        self.terms = {id(tensor): RecordedTerm(tensor.ndim > 0) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if not isinstance(value, torch.Tensor):  # fake tensors are asked for their device
            return value
        self.alive.append(value)
        named = {key: self.term(x) for key, x in (kwargs or {}).items()}
        self.terms[id(value)] = RecordedTerm(value.ndim > 0, func, list(map(self.term, args)), named)
        return value

    def term(self, value: Any) -> Any:
        """The term of a tensor; what is no tensor, as it is."""
        return self.terms[id(value)] if isinstance(value, torch.Tensor) else value


def recorded_terms(
    fn: Callable[..., Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]
) -> tuple[list[RecordedTerm], list[RecordedTerm]]:
    """The terms of a function's operands, which are anything, and of its results."""
    with internals.no_modes(), internals.autocast_off(), torch.no_grad(), _Recorder(tensors) as mode:
        results = fn(*tensors)
    return [mode.terms[id(x)] for x in tensors], [mode.terms[id(x)] for x in results]


def fits(term: Any, value: Any, found: Found, names: Mapping[float, str] | None = None) -> bool:
    """Whether a value of a program is computed as a term is; adds what is found in the places of terms.

    Args:
        names: if given, numbers need not agree, and those that have a name are found by it.
    """
    if isinstance(term, RecordedTerm):
        if term in found:
            return _same(found[term], value)
        found[term] = value
        return term.op is None or _is_call(term, value, found, names)
    if names is None or isinstance(value, fx.Node) or not isinstance(term, float):
        return _same(term, value)
    name = names.get(term)
    return name is None or _same(found.setdefault(name, value), value)


def _is_call(term: RecordedTerm, value: Any, found: Found, names: Mapping[float, str] | None) -> bool:
    if not isinstance(value, fx.Node) or value.target is not term.op:
        return False
    if len(value.args) != len(term.args) or value.kwargs.keys() != term.kwargs.keys():
        return False
    pairs = [*zip(term.args, value.args, strict=True)]
    pairs += [(x, value.kwargs[key]) for key, x in term.kwargs.items()]
    return all(fits(x, y, found, names) for x, y in pairs)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one node, or two numbers are equal but for the rounding of a float64."""
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    if numbers and not isinstance(one, bool) and not isinstance(other, bool):
        return one == other or math.isclose(one, other, rel_tol=1e-15)
    return one is other or (not isinstance(one, fx.Node) and type(one) is type(other) and one == other)
