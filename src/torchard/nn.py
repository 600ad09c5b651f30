"""Stateless layers and initialisers; `torchard.functional.nn` under its public name."""

from torchard.functional.nn import *  # noqa: F403
from torchard.functional.nn import __all__ as __all__
