"""How many examples a property test draws: few in `make test`, many in `make explore`."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["examples"]


def examples(ci: int, explore: int) -> int:
    """The first number by default, the second under ``--hypothesis-profile=explore``."""
    return ci if settings.get_current_profile_name() == "ci" else explore
