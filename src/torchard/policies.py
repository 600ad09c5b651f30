"""What a backward keeps; `torchard.functional.policies` under its public name."""

from torchard.functional.policies import *  # noqa: F403
from torchard.functional.policies import __all__ as __all__
