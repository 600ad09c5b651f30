"""Random numbers from keys: pure functions, no generator and no global state.

A key is an int64 tensor ``[2]``. Draw from a key once, or split it. Values depend only on the key and on
the index of an element, so they are the same on every mesh and when they are recomputed. Keys may have
batch dims, ``[*batch, 2]``, which are the first dims of the result.

>>> from torchard import random
>>> first, second = random.split(random.key(0))
>>> random.randint(first, (5,), 0, 10)
tensor([4, 1, 5, 4, 2])
>>> random.normal(second, (2, 3)).shape
torch.Size([2, 3])
"""

from torchard.functional.random import *  # noqa: F403
from torchard.functional.random import __all__ as __all__
