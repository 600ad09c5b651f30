"""Printing, and calling Python functions, from inside of transformed functions.

>>> import torch, torchard as ta
>>> @ta.jit
... def f(x):
...     ta.debug.print("x = {}", x)
...     return 2 * x
>>> f(torch.tensor(1.5))
x = 1.5
tensor(3.)
"""

from torchard.functional.callbacks.calls import callback, print, print_cotangent

__all__ = ["callback", "print", "print_cotangent"]
