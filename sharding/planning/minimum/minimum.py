"""A plan as the minimum of its seconds on a machine (`model.py`).

The minimum is exact along one axis, given what the others do, or has a bound where that takes too long
(`bounds.py`). Axes take turns until none improves the plan: first each value is in one layout, then some
are in two. Then axes may go in pairs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from torch import fx

from torchard.sharding.layouts.layout import Sizes
from torchard.sharding.planning.decision import Given, LayoutDecision
from torchard.sharding.planning.minimum.alternatives import NONE, Alternatives
from torchard.sharding.planning.minimum.bounds import solved
from torchard.sharding.planning.minimum.elimination import TooWide
from torchard.sharding.planning.minimum.model import IN_TWO, Energy, EnergyModel

__all__ = ["Minimized", "minimized"]

_LITTLE = 1e-9
_TURNS = 4  # times that each axis is tried on a given machine; once without one


class Minimized(NamedTuple):
    """A decision, and its seconds in the model."""

    decision: LayoutDecision
    seconds: float


def minimized(
    graph: fx.Graph,
    given: Given,
    sizes: Sizes,
    start: LayoutDecision,
    axes: Iterable[str],
    alternatives: Alternatives = NONE,
) -> Minimized:
    """A decision that no change along one of these axes improves, beginning with another.

    On a given machine, values may be in two layouts, and then the axes are tried two at a time.
    """
    energy, axes = Energy(graph, given, sizes, alternatives), list(axes)
    best = _by_turns(energy, axes, Minimized(start, np.inf), 0)
    if not given.on:
        return best
    best = _by_turns(energy, axes, best, IN_TWO)
    for pair in itertools.combinations(axes, 2):
        best = _along(energy, pair, best, 0)
    return best


def _by_turns(energy: Energy, axes: list[str], best: Minimized, most_in_two: int) -> Minimized:
    """A decision that no change along one axis improves."""
    waiting = deque(axes)
    for _ in range((_TURNS if energy.given.on else 1) * len(axes)):
        if not waiting:
            break
        axis = waiting.popleft()
        found = _along(energy, (axis,), best, most_in_two)
        if found.decision is not best.decision:
            waiting.extend(a for a in axes if a not in waiting and a != axis)
        best = found
    return best


def _along(
    energy: Energy, axes: tuple[str, ...], now: Minimized, most_in_two: int
) -> Minimized:
    """The cheapest decision that differs along some axes only, or the same one, if that is none."""
    with contextlib.suppress(TooWide):
        return _solved(EnergyModel(energy, energy.choices(axes, now.decision), most_in_two), now)
    return now


def _solved(model: EnergyModel, now: Minimized) -> Minimized:
    states = model.states()
    seconds = model.problem.cost(states)
    try:
        found = solved(model.problem, model.energy.budget, states)
    except TooWide:
        return now
    if found.cost >= seconds * (1 - _LITTLE):
        return now._replace(seconds=seconds)
    made = model.decision(found.states)
    if model.alternatives.versions:
        model.plan_others(made, found.states)
    return Minimized(made, found.cost)
