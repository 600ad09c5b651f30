"""Solutions of equations, differentiated by the implicit function theorem: solvers are opaque.

>>> import torch
>>> from torchard import implicit
>>> def newton(f, x):
...     for _ in range(8):
...         x = x - f(x) / torch.func.grad(f)(x)
...     return x
>>> def cube_root(a):
...     return implicit.root(lambda x, a: x**3 - a, torch.ones_like(a), a, solve=newton)
>>> torch.func.grad(cube_root)(torch.tensor(8.0))       # 1/3 * 8 ** (-2/3)
tensor(0.0833)
"""

from torchard.functional.custom.implicit import *  # noqa: F403
from torchard.functional.custom.implicit import __all__ as __all__
