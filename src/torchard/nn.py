"""Stateless layers and initializers: pure functions of tensors, with torch's semantics.

Parameters are arguments and randomness comes from a key (`torchard.random`), so every layer can be
traced, sharded and transformed. Weights are laid out as torch's: a linear weight is ``[out, in]``.

>>> import torch
>>> from torchard import nn, random
>>> w = nn.init_normal(random.key(0), (8, 4))
>>> nn.gelu(nn.linear(torch.ones(2, 4), w)).shape
torch.Size([2, 8])
"""

from torchard.functional.nn import *  # noqa: F403
from torchard.functional.nn import __all__ as __all__
