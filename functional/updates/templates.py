"""Templates: what updates look like in a program, whatever their numbers are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from torchard.functional.updates.kernels import AdamWUpdate, SgdUpdate, Update
from torchard.functional.updates.terms import Found, RecordedTerm, fits, recorded_terms

__all__ = ["Member", "member_of"]


class Member(NamedTuple):
    """The update of one parameter in a program.

    Attributes:
        bases: the nodes of what is updated: the parameter, and its state.
        shared: what all parameters share: nodes, or numbers.
        results: the nodes of the updated values, the parameter's first.
        inside: the nodes of its operations on tensors of the parameter's shape.
        numbers: the nodes of its operations on what is shared.
    """

    update: Update
    bases: tuple[fx.Node, ...]
    grad: fx.Node
    shared: tuple[Any, ...]
    results: tuple[fx.Node, ...]
    inside: frozenset[fx.Node]
    numbers: frozenset[fx.Node]


@dataclass(frozen=True)
class _Terms:
    """The terms of an update of one parameter: its operands, and its results."""

    operands: list[RecordedTerm]
    results: list[RecordedTerm]


@functools.lru_cache(maxsize=64)
def _terms(update: Update, rate: float | None) -> _Terms:
    """The terms of an update.

    Args:
        rate: the learning rate; None if it is a tensor.
    """
    tensors = [torch.ones(2) for _ in range(update.width + 1)]
    tensors += [torch.ones((), dtype=torch.float64) for _ in range(update.shared - (rate is not None))]
    numbers = () if rate is None else (rate,)
    return _Terms(*recorded_terms(lambda *given: update.one(*given, *numbers), tensors))


# Numbers that no program has, and what they stand for.
_RATE, _DECAY, _EPS, _B2, _MOMENTUM = 0.0137713, 0.0613191, 3.7131e-07, 0.9571379, 0.7193711
_B1 = (0.8437137, 0.2437137)  # the arithmetic differs below 0.5
_NAMES: Mapping[float, str] = {
    _RATE: "rate",
    _DECAY: "decay",
    1 - _RATE * _DECAY: "factor",
    _EPS: "eps",
    _B2: "b2",
    _MOMENTUM: "momentum",
    **dict.fromkeys(_B1, "b1"),
}


def _templates() -> Iterator[tuple[Update, float | None]]:
    """Updates to be looked for, in this order, each with a rate that is a number, or a tensor."""
    updates: list[Update] = [AdamWUpdate(b1, _B2, _EPS, _DECAY) for b1 in _B1]
    # Without momentum, an update is a difference as any other, and no kernel is faster.
    ways = itertools.product((True, False), (_DECAY, 0.0))
    updates += [SgdUpdate(_MOMENTUM, *way) for way in ways]
    yield from itertools.product(updates, (_RATE, None))


@functools.cache
def _roots() -> frozenset[Any]:
    return frozenset(_terms(*template).results[0].op for template in _templates())


def member_of(node: fx.Node) -> Member | None:
    """The update whose new parameter a node is; None if it is none."""
    if node.target not in _roots():
        return None
    members = (_member(node, update, rate) for update, rate in _templates())
    return next((member for member in members if member is not None), None)


def _member(node: fx.Node, like: Update, rate: float | None) -> Member | None:
    """The update that a node is the new parameter of, if it is one like this but for its numbers."""
    found: Found = {}
    if not fits(_terms(like, rate).results[0], node, found, _NAMES):
        return None
    number = None if rate is None else found["rate"]
    update = _numbered(like, found, number)
    if update is None:
        return None
    terms = _terms(update, number)
    found = {}
    if not fits(terms.results[0], node, found):
        return None
    operands = [found[term] for term in terms.operands]
    if not all(isinstance(operand, fx.Node) for operand in operands):
        return None
    bases, (grad, *shared) = operands[: update.width], operands[update.width :]
    calls = [(term.wide, value) for term, value in found.items() if term.op is not None]
    return Member(
        update,
        tuple(bases),
        grad,
        (*shared, *(() if number is None else (number,))),
        tuple(found[term] for term in terms.results),
        frozenset(value for wide, value in calls if wide),
        frozenset(value for wide, value in calls if not wide),
    )


def _numbered(like: Update, found: Found, rate: float | None) -> Update | None:
    """The update like another one, with the numbers that were found in the place of its own."""
    decay = found.get("decay", 0.0)
    if isinstance(like, AdamWUpdate):
        if rate is not None:
            factor = found["factor"]
            if isinstance(factor, fx.Node) or not (rate or factor == 1):
                return None
            decay = _rounded((1 - factor) / rate if rate else 0.0, lambda d: 1 - rate * d == factor)
        numbers: dict[str, Any] = {name: found[name] for name in ("b1", "b2", "eps")}
    else:
        numbers = {"momentum": found["momentum"]}
        if not numbers["momentum"]:  # of which a kernel has no velocities
            return None
    numbers["decay"] = decay
    valid = all(type(x) in (int, float) and x >= 0 for x in numbers.values())
    return replace(like, **numbers) if valid else None


def _rounded(value: float, fits: Callable[[float], bool]) -> float:
    """A value with as few digits as fit: the number that a user wrote, if it was short."""
    return next((d for n in range(1, 17) if fits(d := float(f"{value:.{n}g}"))), value)
