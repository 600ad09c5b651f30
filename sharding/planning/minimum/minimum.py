"""A plan as the minimum of its seconds on a machine (`model.py`).

The minimum is exact along one axis, given what the others do, or has a bound where that takes too long
(`bounds.py`). Axes take turns until none improves the plan, and then may go in pairs.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

from torch import fx

from torchard.sharding.layouts.layout import Sizes
from torchard.sharding.planning.decision import Given, LayoutDecision
from torchard.sharding.planning.minimum.alternatives import NONE, Alternatives
from torchard.sharding.planning.minimum.bounds import proved, solved
from torchard.sharding.planning.minimum.elimination import TooWide
from torchard.sharding.planning.minimum.model import Energy, EnergyModel

__all__ = ["improved"]

_LITTLE = 1e-9
_TURNS = 4  # times that each axis is tried


def improved(
    graph: fx.Graph,
    given: Given,
    sizes: Sizes,
    start: LayoutDecision,
    axes: Iterable[str],
    alternatives: Alternatives = NONE,
    *,
    pairs: bool = False,
) -> LayoutDecision:
    """A decision that no change along one of these axes improves, beginning with another.

    Args:
        pairs: whether then the axes are tried two at a time.
    """
    energy, best = Energy(graph, given, sizes, alternatives), start
    waiting = deque(axes)
    for _ in range(_TURNS * len(waiting)):
        if not waiting:
            break
        axis = waiting.popleft()
        better = _along(energy, (axis,), best)
        if better is not None:
            best = better
            waiting.extend(a for a in axes if a not in waiting and a != axis)
    for pair in itertools.combinations(axes, 2) if pairs else ():
        best = _along(energy, pair, best) or best
    return best


def _along(energy: Energy, axes: tuple[str, ...], now: LayoutDecision) -> LayoutDecision | None:
    """The cheapest decision that differs along some axes only; None if that is none."""
    try:
        model = EnergyModel(energy, energy.choices(axes, now))
        states = model.states()
        if len(axes) == 1:
            found = solved(model.problem, energy.budget)
        else:
            found = proved(model.problem, states, energy.budget)
    except TooWide:
        return None
    if found.cost >= model.problem.cost(states) * (1 - _LITTLE):
        return None
    made = model.decision(found.states)
    if energy.alternatives.versions:
        model.plan_others(made, found.states)
    return made
