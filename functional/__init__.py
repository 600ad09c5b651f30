"""What a pure function is, and what can be done to any of them.

Imports neither `torchard.sharding` nor `torchard.kernels`. Functions that are called as their module is
(`checkpoint`, `jit`, `trace`) are what `from torchard.functional import ...` gives.
"""

from torchard.functional.checkpoint import checkpoint
from torchard.functional.jit import jit
from torchard.functional.trace import trace

__all__ = ["checkpoint", "jit", "trace"]
