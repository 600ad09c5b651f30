"""What can go wrong with a function that should be pure, and while its program runs."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "DerivativeError",
    "DonatedError",
    "KernelError",
    "NoMatch",
    "PatternError",
    "PurityError",
    "RetraceWarning",
    "StaticArgumentError",
    "TorchVersionWarning",
    "UnexpectedTracerError",
]


class PurityError(RuntimeError):
    """The function is not pure; the message names the line and the way out."""


class UnexpectedTracerError(RuntimeError):
    """A tensor of a trace was used after it: it has no value. The message names the line that made it."""


class StaticArgumentError(TypeError):
    """An argument is neither a tensor, a float, nor a hashable static value."""


class DerivativeError(RuntimeError):
    """A program cannot be differentiated faithfully."""


class CheckpointError(ValueError):
    """What a checkpoint was asked for cannot be done: no such label or scope, or too small a budget."""


class PatternError(ValueError):
    """A pattern that cannot be looked for: the message says what is wrong with it."""


class NoMatch(ValueError):
    """A pattern that was asked for is nowhere in the function; the message has what came nearest."""


class KernelError(ValueError):
    """A kernel that does not do what its reference does, or cannot be used as it was asked for."""


class RetraceWarning(UserWarning):
    """A function is traced again and again; the message names the leaf that kept changing."""


class TorchVersionWarning(UserWarning):
    """This version of torch is none that torchard is tested with."""


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
