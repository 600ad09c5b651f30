"""How much is tried while a pattern is looked for, so that a search ends in time linear in the program.

Matching up to commutativity is exponential where many values look alike (second derivatives of small
square matrices). Steps are counted, not timed: every rank stops at the same place.
"""

from __future__ import annotations

__all__ = ["EVALUATION", "Effort", "Exhausted"]

# Of one pattern: steps of unification. The gradient of a transformer's step takes 4 to 20 per value.
_LEAST, _PER_VALUE = 10_000, 50
EVALUATION = 16  # what verifying a proposal, or evaluating one operation of it, counts as


class Exhausted(Exception):
    """A search has taken as many steps as it may."""


class Effort:
    """The steps one search may take.

    Args:
        values: how many the program has.
        patience: times as many, for what was asked for by name.
    """

    def __init__(self, values: int, patience: int = 1) -> None:
        self.limit = patience * (_LEAST + _PER_VALUE * values)
        self.left = self.limit

    def begin(self) -> None:
        """A new search."""
        self.left = self.limit

    def spend(self, steps: int = 1) -> None:
        """Count steps.

        Raises:
            Exhausted: there are none left.
        """
        self.left -= steps
        if self.left < 0:
            raise Exhausted
