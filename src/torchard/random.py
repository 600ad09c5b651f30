"""Random numbers from keys; `torchard.functional.random` under its public name."""

from torchard.functional.random import *  # noqa: F403
from torchard.functional.random import __all__ as __all__
