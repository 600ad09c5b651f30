"""What can go wrong with a function that should be pure."""

from __future__ import annotations

__all__ = [
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
