"""torchard: model execution as function composition, for PyTorch.

A model is a pure function over a pytree of parameters; how it runs (sharded, rematerialised,
fused, compiled) is said beside it, by transforms. This module re-exports the public names; the
three folders behind it are `torchard.functional`, `torchard.sharding` and `torchard.kernels`.
"""

from torchard.functional import nn, optim, random

__version__ = "0.1.0"

__all__ = ["__version__", "nn", "optim", "random"]
