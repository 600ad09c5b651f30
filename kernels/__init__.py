"""Groups of operations that run as one kernel: patterns, kernels, and ``fuse``.

Imports `torchard.functional`, never `torchard.sharding`.
"""

from torchard.kernels.execution.buffers import release
from torchard.kernels.fuse import find, fuse
from torchard.kernels.modules import replaced
from torchard.kernels.patterns.kernel import KERNELS, Kernel, register_kernel
from torchard.kernels.patterns.pattern import Pattern, any_of, call

__all__ = [
    "KERNELS",
    "Kernel",
    "Pattern",
    "any_of",
    "call",
    "find",
    "fuse",
    "register_kernel",
    "release",
    "replaced",
]
