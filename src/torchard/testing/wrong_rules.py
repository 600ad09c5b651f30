"""Which rule of custom_vjp or custom_jvp is wrong, where a derivative is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchard.functional.custom.ruled import Ruled, calls_seen
from torchard.testing.laws.vectors import direction_at, flattened

__all__ = ["wrong_rules"]

# The relative distance of a rule's derivative from its function's at which the rule is named.
_APART = 1e-6


def wrong_rules(fn: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """The end of a message: the rules in a call of fn that are not the derivative of their function."""
    with calls_seen() as calls:
        fn(*args)
    found: dict[str, None] = {}
    for function, given in calls:
        for i in set(range(len(given))) - set(function.static):
            apart = _distance(function, given, i)
            if apart > _APART:
                found.setdefault(
                    f"; {function.rule_text()} is off by {apart:.2g} of the derivative of the function "
                    f"itself, with respect to argument {i}"
                )
    return "".join(found)


def _distance(function: Ruled, args: tuple[Any, ...], i: int) -> float:
    """The relative distance between the derivatives of rule and function along a direction."""

    def along(called: Callable[..., Any]) -> torch.Tensor:
        user = flattened(lambda x: called(*args[:i], x, *args[i + 1 :]), (args[i],), 0)
        directions = direction_at(user.at, torch.Generator().manual_seed(0))
        return torch.cat([t.flatten() for t in torch.func.jvp(user.fn, user.at, directions)[1]])

    try:
        own, rule = along(function.fn), along(function)
    except (ValueError, RuntimeError):  # nothing to differentiate, or no derivative
        return 0.0
    return float((rule - own).norm() / own.norm().clamp(min=torch.finfo(own.dtype).tiny))
