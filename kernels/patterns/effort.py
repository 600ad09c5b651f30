"""The effort of a search for a pattern, bounded linearly in the size of the program.

Matching up to commutativity is exponential where many values look alike (second derivatives of small
square matrices). Steps are counted, not timed: every rank stops at the same place.
"""

from __future__ import annotations

__all__ = ["EVALUATION", "Effort", "Exhausted"]

# Steps of unification per pattern. The gradient of a transformer's step takes 4 to 20 per value.
_LEAST, _PER_VALUE = 10_000, 50
EVALUATION = 16  # the cost of verifying a proposal, or evaluating one operation of it, in steps


class Exhausted(Exception):
    """A search has exceeded its number of steps."""


class Effort:
    """The number of steps that one search may take.

    Args:
        values: the number of values in the program.
        patience: a factor on the number of steps, larger for patterns requested by name.
    """

    def __init__(self, values: int, patience: int = 1) -> None:
        self.limit = patience * (_LEAST + _PER_VALUE * values)
        self.left = self.limit

    def begin(self) -> None:
        """Begin a new search."""
        self.left = self.limit

    def spend(self, steps: int = 1) -> None:
        """Count steps.

        Raises:
            Exhausted: no steps are left.
        """
        self.left -= steps
        if self.left < 0:
            raise Exhausted
