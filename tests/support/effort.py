"""How many examples a property test draws: few in `make test`, many in `make explore`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings

__all__ = ["cases", "examples"]

Case = TypeVar("Case")


def examples(ci: int, explore: int) -> int:
    """The first number by default, the second under ``--hypothesis-profile=explore``."""
    return ci if settings.get_current_profile_name() == "ci" else explore


def cases(ci: Sequence[Case], explore: Sequence[Case]) -> list[Case]:
    """The first by default, both under ``--hypothesis-profile=explore``."""
    return list(ci) if settings.get_current_profile_name() == "ci" else [*ci, *explore]
