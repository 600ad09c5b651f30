"""Optimisers as pairs of pure functions; `torchard.functional.optim` under its public name."""

from torchard.functional.optim import *  # noqa: F403
from torchard.functional.optim import __all__ as __all__
