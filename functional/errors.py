"""What can go wrong with a function that should be pure, and while its program runs."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CollectiveError",
    "DerivativeError",
    "DonatedError",
    "PurityError",
    "RetraceWarning",
    "StaticArgumentError",
]


class PurityError(RuntimeError):
    """The function is not pure; the message names the line and the way out."""


class StaticArgumentError(TypeError):
    """An argument is neither a tensor, a float, nor a hashable static value."""


class DerivativeError(RuntimeError):
    """A program cannot be differentiated faithfully."""


class RetraceWarning(UserWarning):
    """A function is traced again and again; the message names the leaf that kept changing."""


class DonatedError(RuntimeError):
    """A value was used after it had been donated to a call."""


class CollectiveError(RuntimeError):
    """A collective failed: a process that takes part has ended, hangs, or cannot be reached.

    Attributes:
        collective: the record of it, as the plan lists it; None where it is not known which it was.
    """

    def __init__(self, message: str, collective: Any = None) -> None:
        super().__init__(message)
        self.collective = collective
