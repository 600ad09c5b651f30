"""What a backward keeps; `torchard.functional.remat.policies` under its public name."""

from torchard.functional.remat.policies import *  # noqa: F403
from torchard.functional.remat.policies import __all__ as __all__
