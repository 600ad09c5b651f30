"""A plan as the minimum of its seconds on a machine (`model.py`).

The minimum is exact along one axis, given what the others do, or has a bound where that takes too long
(`bounds.py`). Axes take turns until none improves the plan, and then may go in pairs.
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
from torchard.sharding.planning.minimum.model import Energy, EnergyModel

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
    *,
    pairs: bool = False,
) -> Minimized:
    """A decision that no change along one of these axes improves, beginning with another.

    Args:
        pairs: whether then the axes are tried two at a time.
    """
    energy, best = Energy(graph, given, sizes, alternatives), Minimized(start, np.inf)
    waiting = deque(axes)
    for _ in range((_TURNS if given.on else 1) * len(waiting)):
        if not waiting:
            break
        axis = waiting.popleft()
        found = _along(energy, (axis,), best)
        if found.decision is not best.decision:
            waiting.extend(a for a in axes if a not in waiting and a != axis)
        best = found
    for pair in itertools.combinations(axes, 2) if pairs else ():
        best = _along(energy, pair, best)
    return best


def _along(energy: Energy, axes: tuple[str, ...], now: Minimized) -> Minimized:
    """The cheapest decision that differs along some axes only, or the same one, if that is none.

    First each value is in one layout, then some are in two, where there are few: that is along one axis.
    """
    best = now
    with contextlib.suppress(TooWide):
        choices = energy.choices(axes, now.decision)
        best = _solved(EnergyModel(energy, choices, most_in_two=0), now)
        if energy.given.on and len(axes) == 1:
            if best.decision is not now.decision:
                choices = energy.choices(axes, best.decision)
            best = _solved(EnergyModel(energy, choices), best)
    return best


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
